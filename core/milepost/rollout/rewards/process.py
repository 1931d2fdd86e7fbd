"""One reward worker as the controller sees it: a process group that can be killed, a socket, and its output.

A worker runs other people's code. So nothing here waits for it without a limit: reads and writes are non-blocking, what
it prints is drained into a capped log, and ending it is SIGKILL to its process group and to everything it started.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from milepost.errors import RunError
from milepost.rollout.rewards.wire import Message, encode_line

START_LIMIT = 180.0
"""Seconds a worker may take until its reward is built."""
LOG_LIMIT = 4 << 20
"""Bytes of output kept per worker of a run; the rest is read and dropped."""
TAIL_LIMIT = 6000
"""Bytes of output kept in memory for error messages."""
LINE_LIMIT = 16 << 20
"""Bytes one answer may have."""
CHUNK = 1 << 18
TICK = 0.2
"""Seconds between looks at whether the process is alive: a child of its own can hold its socket open."""
DUMP_TIME = 0.3
"""Seconds a worker that is out of time gets to write down where it hangs."""
TOKEN_NAME = "MILEPOST_REWARD_WORKER"


class WorkerLostError(Exception):
    """A worker ended or no longer makes sense; the message says how."""


class CappedLog:
    """A log file that stops growing at a limit, and the tail of everything written to it."""

    def __init__(self, path: Path, limit: int = LOG_LIMIT) -> None:
        self.path = path
        self.tail = b""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)
        self._room = limit

    def write(self, data: bytes) -> None:
        """Append as much of `data` as the limit allows."""
        self.tail = (self.tail + data)[-TAIL_LIMIT:]
        if self._room > 0:
            self._file.write(data[: self._room])
            self._room -= len(data)
            if self._room <= 0:
                self._file.write(b"\n[the log has reached its limit; further output is dropped]\n")

    def shown(self) -> str:
        """Return the tail as text."""
        return self.tail.decode(errors="replace").strip()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class WorkerProcess:
    """A running worker. Use from one thread only."""

    def __init__(self, setup: Message, log: CappedLog, wake: int) -> None:
        """Start a worker with the given first line (see `worker.main`); it is not ready yet.

        `wake` is a descriptor that ends every wait when it becomes readable.
        """
        self.log = log
        log.tail = b""
        self._incoming = bytearray()
        self._outgoing = bytearray(encode_line(setup))
        self._token = uuid.uuid4().hex
        self._socket, theirs = socket.socketpair()
        self._output, their_output = os.pipe()
        # One thread per BLAS: a pool of workers has its parallelism in the workers, and thread stacks count as memory.
        # So does address space that glibc sets aside for a heap of every thread's own (64 MB), unless there are few.
        limits = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        environment = limits | os.environ | {TOKEN_NAME: self._token}
        with theirs:
            # -P: whatever lies in the working directory must not shadow modules.
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-P", "-m", "milepost.rollout.rewards.worker", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=their_output,
                stderr=their_output,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,
            )
        os.close(their_output)
        self._socket.setblocking(False)
        os.set_blocking(self._output, False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._selector.register(self._output, selectors.EVENT_READ)
        self._selector.register(wake, selectors.EVENT_READ)
        self._wake = wake

    @property
    def pid(self) -> int:
        """Process id, which is also its process group."""
        return self._process.pid

    def wait_ready(self) -> dict[str, Any] | None:
        """Wait until the reward is built; return its `scope` and whether it is `asynchronous`.

        Returns None if woken first. Raises RunError with the worker's traceback if the
        reward cannot be built.
        """
        deadline = time.monotonic() + START_LIMIT
        try:
            while (left := deadline - time.monotonic()) > 0:
                messages, woken = self.wait(left)
                for message in messages:
                    if "failed" in message:
                        raise RunError(f"the reward could not be built in its worker process\n{message['failed']}")
                    if not isinstance(ready := message.get("ready"), dict):
                        raise WorkerLostError(f"it began with {str(message)[:200]}")
                    return ready
                if woken:
                    return None
        except WorkerLostError as error:
            raise RunError(
                f"a reward worker ended before its reward was built: {error}\n"
                f"the end of {self.log.path}:\n{self.log.shown()}"
            ) from error
        raise RunError(
            f"a reward worker was not ready after {START_LIMIT:g} s; the end of {self.log.path}:\n{self.log.shown()}"
        )

    def send(self, line: bytes) -> None:
        """Queue a line; it is written as fast as the worker reads, inside `wait`."""
        self._outgoing += line
        self._write()

    def wait(self, seconds: float) -> tuple[list[Message], bool]:
        """Wait for messages at most `seconds`; return them, and whether the wait was ended by `wake`.

        Returns early with nothing now and then. Raises WorkerLostError if the process has ended or talks nonsense.
        """
        interest = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outgoing else 0)
        self._selector.modify(self._socket, interest)
        events = {key.fd: mask for key, mask in self._selector.select(max(0.0, min(seconds, TICK)))}
        on_socket = events.get(self._socket.fileno(), 0)
        if on_socket & selectors.EVENT_WRITE:
            self._write()
        if self._output in events:
            self._drain()
        messages = self._read() if on_socket & selectors.EVENT_READ else []
        if not messages and self._process.poll() is not None:
            # What it wrote before it ended may have come after the look at the socket.
            messages = self._read()
            if not messages:
                raise WorkerLostError(self._ending())
        return messages, self._wake in events

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    def stack(self) -> str:
        """Ask the worker where it is, and return the Python stack of its threads; may be empty."""
        self._drain()
        self.log.tail = b""
        self._process.send_signal(signal.SIGUSR1)
        with selectors.DefaultSelector() as selector:
            selector.register(self._output, selectors.EVENT_READ)
            deadline = time.monotonic() + DUMP_TIME
            while (left := deadline - time.monotonic()) > 0 and selector.select(left) and self._drain():
                pass
        return self.log.shown()

    def kill(self) -> None:
        """End the process, its group and everything else it started; return when it is gone."""
        for _ in range(10):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
            if not self._kill_strays():
                break
        self._process.wait()
        self._drain()
        self._selector.close()
        self._socket.close()
        os.close(self._output)

    def _kill_strays(self) -> bool:
        """Kill processes that left the group but carry this worker's mark; return whether there were any."""
        mark = f"{TOKEN_NAME}={self._token}".encode()
        found = False
        for folder in Path("/proc").glob("[0-9]*"):
            # Processes of other users, and those that end while we look.
            with contextlib.suppress(OSError):
                if int(folder.name) != self.pid and mark in (folder / "environ").read_bytes():
                    os.kill(int(folder.name), signal.SIGKILL)
                    found = True
        return found

    def _write(self) -> None:
        with contextlib.suppress(BlockingIOError):
            try:
                while self._outgoing:
                    del self._outgoing[: self._socket.send(self._outgoing[:CHUNK])]
            except (BrokenPipeError, ConnectionResetError):
                # The end of the process is noticed, with its status, in `wait`.
                self._outgoing.clear()

    def _read(self) -> list[Message]:
        try:
            for _ in range(16):
                data = self._socket.recv(CHUNK)
                if not data:
                    self._hung_up()
                    break
                self._incoming += data
        except BlockingIOError:
            pass
        except ConnectionResetError:
            self._hung_up()
        *lines, rest = bytes(self._incoming).split(b"\n")
        if len(rest) > LINE_LIMIT:
            raise WorkerLostError(f"it sent {len(rest)} bytes that are no answer")
        self._incoming = bytearray(rest)
        return [self._parse(line) for line in lines]

    def _hung_up(self) -> None:
        """The socket is closed: the process is about to end, or has closed it without ending."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(TICK)
        if b"\n" not in self._incoming:
            raise WorkerLostError(self._ending())

    def _parse(self, line: bytes) -> Message:
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WorkerLostError(f"it sent what is not JSON: {line[:200]!r}") from error
        if not isinstance(message, dict):
            raise WorkerLostError(f"it sent what is not a message: {line[:200]!r}")
        return message

    def _drain(self) -> int:
        """Move printed output into the log, up to a limit per call; return the number of bytes."""
        moved = 0
        with contextlib.suppress(BlockingIOError):
            while moved < 16 * CHUNK:
                data = os.read(self._output, CHUNK)
                if not data:
                    # Every holder has closed it; a selector would report it readable for ever.
                    with contextlib.suppress(KeyError):
                        self._selector.unregister(self._output)
                    break
                self.log.write(data)
                moved += len(data)
        return moved

    def _ending(self) -> str:
        code = self._process.poll()
        if code is None:
            return "it closed its connection"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"it was killed by {signal.Signals(-code).name}"
        return f"it exited with code {code}"
