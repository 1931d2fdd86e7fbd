"""milepost's command line in processes of their own, without the seconds that each spends on importing torch.

A process of this kind is a copy of one that has imported everything and done nothing: its pid, signals, exit code,
environment, folder and output are its own, as are its threads, random state and plugins. What it shares with the others
is the seed of hashes; test_kills.py has runs that do not.
"""

from __future__ import annotations

import atexit
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from multiprocessing import resource_tracker
from pathlib import Path

from forked import forked

TESTS = Path(__file__).parent


class Command:
    """A running `python -m milepost ARGUMENTS`, or another module; much like a `subprocess.Popen`."""

    def __init__(
        self,
        *arguments: str | Path,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        module: str = "milepost",
        own_group: bool = False,
    ) -> None:
        """Start it in the folder `cwd`, with `environment` instead of this process's, perhaps as a group's leader."""
        self._words = (module, *map(str, arguments))
        self._folder = Path(tempfile.mkdtemp(prefix="milepost-command-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        given = dict(os.environ if environment is None else environment) | {"OMP_NUM_THREADS": "1"}
        self._process = forked().Process(target=_run, args=(self._words, cwd, given, self._folder, own_group))
        self._process.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return its exit code, minus the number of a signal that killed it; None while it runs."""
        return self._process.exitcode

    @property
    def stdout(self) -> str:
        """What it has printed to stdout so far."""
        return self._printed("stdout")

    @property
    def stderr(self) -> str:
        """What it has printed to stderr so far."""
        return self._printed("stderr")

    @property
    def output(self) -> str:
        """What it has printed so far: stdout, then stderr."""
        return self.stdout + self.stderr

    def finish(self, timeout: float = 400) -> tuple[int, str]:
        """Wait for its end; return its exit code and all of its output.

        Kills it and fails the test, with what it printed, after `timeout` seconds.
        """
        self._process.join(timeout)
        code = self.poll()
        if code is None:
            self.kill()  # it is not to stand in the way of others
            raise AssertionError(f"{self._words} did not end in {timeout:g} s; its output:\n{self.output}")
        return code, self.output

    def wait_until(self, condition: Callable[[], object], timeout: float = 400) -> None:
        """Wait until `condition()` holds. Fails the test, with what the command printed, if it ends before that.

        Kills it and fails the test after `timeout` seconds.
        """
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.poll() is None, f"{self._words} ended with {self.poll()}; its output:\n{self.output}"
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"{self._words} did not get there in {timeout:g} s; its output:\n{self.output}")
            time.sleep(0.005)

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless it has ended."""
        self.send_signal(signal.SIGKILL)

    def _printed(self, stream: str) -> str:
        path = self._folder / stream
        return path.read_text(errors="replace") if path.exists() else ""


def _run(
    words: tuple[str, ...], cwd: Path, environment: Mapping[str, str], output: Path, own_group: bool = False
) -> None:
    """Be `python -m WORDS` in the folder `cwd`, writing to the files `stdout` and `stderr` in `output`."""
    if own_group:
        os.setpgid(0, 0)
    # As a terminal starts it; what runs the tests may have been started in the background, where SIGINT is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    for number, name in ((1, "stdout"), (2, "stderr")):
        with (output / name).open("ab") as file:
            os.dup2(file.fileno(), number)
    # Named semaphores and shared memory get a tracker of the process's own: what it leaks when it is killed is not for
    # the tests' process to report.
    for name in ("_fd", "_pid"):
        setattr(resource_tracker._resource_tracker, name, None)
    sys.argv = list(words)
    sys.path = [str(cwd), *(path for path in sys.path if not Path(path).is_relative_to(TESTS))]
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()
