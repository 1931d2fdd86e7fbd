"""milepost's command line in processes of their own, without the seconds that each spends on importing torch.

A process of this kind is a copy of one that has imported everything and done nothing: its pid, signals, exit code,
environment, folder and output are its own, as are its threads, random state and plugins. What it shares with the others
is the seed of hashes; test_kills.py has runs that do not.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path

PRELOADED = ("milepost.loop", "milepost.cli.train", "transformers.models.qwen3.modeling_qwen3")


class Command:
    """A running `milepost ARGUMENTS`, much like a `subprocess.Popen`; its stderr goes where its stdout goes."""

    def __init__(self, *arguments: str | Path, cwd: Path, environment: Mapping[str, str] | None = None) -> None:
        """Start it in the folder `cwd`, with `environment` instead of this process's."""
        self.arguments = tuple(map(str, arguments))
        descriptor, name = tempfile.mkstemp(prefix="milepost-output-", suffix=".log")
        os.close(descriptor)
        self._output = Path(name)
        given = dict(os.environ if environment is None else environment) | {"OMP_NUM_THREADS": "1"}
        self._process = _context().Process(target=_run, args=(self.arguments, str(cwd), given, name))
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit code, minus the number of a signal that killed it; None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Return `returncode`."""
        return self._process.exitcode

    @property
    def output(self) -> str:
        """What it has printed so far, on either stream."""
        return self._output.read_text(errors="replace")

    def wait(self, timeout: float) -> int:
        """Wait for its end; return its exit code. Fails the test, with what it printed, after `timeout` seconds."""
        self._process.join(timeout)
        assert self.returncode is not None, f"{self.arguments} did not end in {timeout:g} s; its output:\n{self.output}"
        return self.returncode

    def finish(self, timeout: float = 600) -> tuple[int, str]:
        """Wait for its end as `wait` does; return its exit code and all of its output."""
        return self.wait(timeout), self.output

    def wait_until(self, condition: Callable[[], object], timeout: float = 600) -> None:
        """Wait until `condition()` holds. Fails the test, with what the command printed, if it ends before that."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.poll() is None, f"{self.arguments} ended with {self.returncode}; its output:\n{self.output}"
            late = f"{self.arguments} is not where it is waited for after {timeout:g} s; its output:\n{self.output}"
            assert time.monotonic() < deadline, late
            time.sleep(0.005)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)


@cache
def _context() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def _run(arguments: tuple[str, ...], folder: str, environment: dict[str, str], output: str) -> None:
    """Be `python -m milepost ARGUMENTS`."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    with Path(output).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["milepost", *arguments]
    # Named semaphores and shared memory get a tracker of the process's own: what it leaks when it is killed is not for
    # the tests' process to report.
    for name in ("_fd", "_pid"):
        setattr(resource_tracker._resource_tracker, name, None)
    from milepost.cli import main

    try:
        main()
    finally:
        atexit._run_exitfuncs()
