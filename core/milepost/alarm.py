"""Stopping code of other people that takes too long, in this very process."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class TimeIsUpError(BaseException):
    """A time limit ran out. Not an Exception, so that code which survives any error does not survive this one."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise TimeIsUpError in the body once it has taken this many seconds.

    Works in the main thread, where Python delivers signals; elsewhere, and for None, there is no limit. What hangs
    inside a C function that looks at no signals is not reached either.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(signum: int, frame: FrameType | None) -> None:
        raise TimeIsUpError(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
