"""What every process of a run has in common: a log, and an answer to what it is doing right now."""

from __future__ import annotations

import faulthandler
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from milepost.cluster.failures import Failure, Outcome
from milepost.cluster.logs import log_folder, redirect_output
from milepost.cluster.messages import Setup

IDLE = "idle"
_RAY = f"{os.sep}site-packages{os.sep}ray{os.sep}"


@dataclass(frozen=True, slots=True)
class Report:
    """What a process is doing."""

    phase: str
    seconds: float
    """How long it has been."""
    stack: str
    """Where its computing thread stands; empty while idle."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Which process it is."""

    pid: int
    node: str


class Host:
    """Base class of what runs in a process of its own.

    `stay` and `report` are called in threads of their own, so that they work while something else computes or hangs.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        redirect_output(log_folder(setup.run_dir) / f"{setup.name}.log")
        # For a process that holds the interpreter and so cannot report: the signal writes its stacks to the log.
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
        self._phase = IDLE
        self._since = time.monotonic()
        self._thread: int | None = None

    def identity(self) -> Outcome:
        """Return this process's `Identity`."""
        return Outcome(Identity(os.getpid(), platform.node()))

    def stay(self) -> None:
        """Never return: whoever waits for this learns at once that the process died."""
        threading.Event().wait()

    def report(self) -> Report:
        """Say what the process is doing."""
        phase, since = self._phase, self._since
        frame = sys._current_frames().get(self._thread or 0)
        stack = traceback.extract_stack(frame) if frame and phase != IDLE else []
        # Without the frames that every call has: Ray's, and this class's.
        own = [entry for entry in stack if _RAY not in entry.filename and entry.filename != __file__]
        return Report(phase, time.monotonic() - since, "".join(traceback.format_list(own)).rstrip())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Be in a named phase."""
        self.enter(name)
        try:
            yield
        finally:
            self.enter(IDLE)

    def enter(self, name: str) -> None:
        """Begin a named phase in the calling thread."""
        self._phase, self._since, self._thread = name, time.monotonic(), threading.get_ident()

    def run(self, phase: str, function: Callable[[], Any]) -> Outcome:
        """Call a function in a named phase; an exception is logged and returned as data."""
        with self.phase(phase):
            try:
                return Outcome(function())
            except Exception as error:  # noqa: BLE001  the controller raises it again
                return self.failed(phase, error)

    def failed(self, phase: str, error: Exception) -> Outcome:
        """Log an exception that is being handled, and return it as data."""
        print(f"{phase} failed\n{traceback.format_exc().rstrip()}", file=sys.stderr, flush=True)
        return Outcome(failure=Failure.of(error))
