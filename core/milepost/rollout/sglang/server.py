"""A SGLang server as a process of its own: started, watched, and killed with everything it started."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import util
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from milepost.errors import RunError

CPU_STAND_INS = Path(__file__).parent / "cpu"
"""Folder of packages for the engine's processes on a CPU."""

STAND_INS = ("IPython", "sgl_kernel", "torchvision")
"""Those packages; each lies in a folder of its name and is put on the path only if the real one is not installed."""

TAIL_LINES = 20
POLL_SECONDS = 0.25
TERM_SECONDS = 10.0
"""How long a server may take to leave by itself before its group is killed; SGLang drains requests for 5."""


class Server(Protocol):
    """An engine's server, wherever it runs. `SGLangServer` is one on this machine."""

    @property
    def endpoint(self) -> str:
        """URL, the same after every start."""
        ...

    async def start(self) -> None:
        """Start and wait until it answers. Raises RunError with the end of its log if it does not."""
        ...

    async def stop(self) -> None:
        """Shut down, at the latest by force, with everything it started."""
        ...

    async def alive(self) -> bool:
        """Whether its process is there."""
        ...

    async def log_tail(self) -> str:
        """Return the path of its log and the last lines."""
        ...


class SGLangServer:
    """Implements `Server` with a child process on this machine.

    The process leads a session, and so a process group, of its own: signals to the run do not reach it, and killing
    the group leaves nothing behind.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        *,
        log_path: Path,
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
        startup_timeout: float = 900.0,
        on_wait: Callable[[float], object] | None = None,
    ) -> None:
        """Take what `options.server_arguments` returns.

        `host` is the address it listens on, `environment` is added to this process's, `startup_timeout` is in seconds,
        and `on_wait` is called with the seconds waited so far while it starts, for a progress line.
        """
        self.log_path = log_path
        self._arguments = dict(arguments)
        self._host = host
        self._environment = dict(environment or {})
        self._startup_timeout = startup_timeout
        self._on_wait = on_wait
        self._ports: tuple[PortReservation, PortReservation] | None = None
        """Of HTTP, and where the engine's ranks meet; kept from the first start on."""
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """URL. Raises RuntimeError before the first start."""
        if self._ports is None:
            raise RuntimeError("the server was not started")
        return f"http://{self._host}:{self._ports[0].port}"

    @property
    def pid(self) -> int:
        """Process id, which is also that of its group. Raises RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError("the server was not started")
        return self._process.pid

    async def start(self) -> None:
        """Start the process and wait until it answers.

        Raises RunError, with the last lines of the log, if it ends or is not up within the time limit.
        """
        await self.stop()
        # The same port after a restart: transports keep the address of an engine.
        self._ports = self._ports or (PortReservation(self._host), PortReservation(""))
        http, meeting = (reservation.port for reservation in self._ports)
        arguments = self._arguments | {"host": self._host, "port": http, "nccl_port": meeting}
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            log.write(f"--- milepost: starting on port {http}\n".encode())
            log.flush()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "milepost.rollout.sglang.launch", json.dumps(arguments), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.log_path.parent,
                env=server_environment(self._arguments["device"]) | self._environment,
                start_new_session=True,
            )
        try:
            await self._wait_until_up()
        except BaseException:
            await self.stop()
            raise

    async def _wait_until_up(self) -> None:
        started = time.monotonic()
        timeout = aiohttp.ClientTimeout(total=30)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while not await _answers(session, self.endpoint):
                waited = time.monotonic() - started
                if not await self.alive():
                    raise RunError(f"a SGLang server ended while it started\n{await self.log_tail()}")
                if waited > self._startup_timeout:
                    raise RunError(
                        f"a SGLang server was not up after {waited:.0f} s (limit {self._startup_timeout:.0f} s)\n"
                        f"{await self.log_tail()}"
                    )
                if self._on_wait is not None:
                    self._on_wait(waited)
                await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        """Ask the process to leave, then kill its group."""
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.terminate()
            deadline = time.monotonic() + TERM_SECONDS
            while self._process.poll() is None and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
        self.kill()

    def kill(self) -> None:
        """Kill the process and everything it started, now."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):  # raised if nothing of the group is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    async def alive(self) -> bool:
        """Whether the process is there."""
        return self._process is not None and self._process.poll() is None

    async def log_tail(self) -> str:
        """Return the path of the log and its last lines."""
        return f"the end of {self.log_path}:\n{tail(self.log_path)}"


async def _answers(session: aiohttp.ClientSession, endpoint: str) -> bool:
    try:
        async with session.get(f"{endpoint}/health_generate") as response:
            return response.status == 200
    except (aiohttp.ClientError, TimeoutError):
        return False


def server_environment(device: str) -> dict[str, str]:
    """Return the environment of a server's processes: this one's, and what the device needs."""
    environment = dict(os.environ)
    # Log-probs of logits / temperature, whatever this shell was set to.
    environment["SGLANG_RETURN_ORIGINAL_LOGPROB"] = "0"
    # `options.SPARE_POSITIONS` may take the context beyond what the model names; requests stay within it.
    environment["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] = "1"
    # Otherwise an engine on loopback would be looked for behind the proxy.
    environment["NO_PROXY"] = environment["no_proxy"] = "*"
    if device == "cuda":
        # Otherwise CUDA graphs keep their memory when they are told to release it.
        environment.setdefault("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "true")
        # The trainer's ranks may leave unequal amounts of memory on the engine's GPUs.
        environment.setdefault("SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK", "false")
    if device == "cpu":
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        environment.setdefault("OMP_NUM_THREADS", "1")
        missing = [name for name in STAND_INS if util.find_spec(name) is None]
        if missing:
            paths = [str(CPU_STAND_INS / name) for name in missing]
            environment["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [environment.get("PYTHONPATH")])])
    return environment


class PortReservation:
    """A TCP port of this machine that nobody else is given while this object lives.

    The socket is bound and never listens: the kernel then gives the port to no one who asks for any, and a server that
    sets SO_REUSEADDR, as they do, may listen on it.
    """

    def __init__(self, host: str) -> None:
        """Reserve a port on an address of this machine; the empty text means all of them."""
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, 0))
        self.port: int = self._socket.getsockname()[1]


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a text file; the empty text if there is none."""
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 64 * 1024))
        text = file.read().decode("utf-8", errors="replace")
    return "\n".join(text.splitlines()[-lines:])
