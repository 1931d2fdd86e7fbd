"""Ctrl-C and SIGTERM: the first asks the run to finish its step and save, the second stops at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

import click

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Whether the user asked the run to stop; `wait` can race it against work that may be abandoned."""

    def __init__(self) -> None:
        self.requested = False
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def request(self) -> None:
        """Ask the run to stop; safe from any thread and from a signal handler."""
        self.requested = True
        self._loop.call_soon_threadsafe(self._event.set)

    async def race(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or None, and `work` cancelled, if the interrupt comes first."""
        task = asyncio.ensure_future(work)
        stop = asyncio.ensure_future(self._event.wait())
        try:
            await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        return None if task.cancelled() else task.result()

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Turn the first SIGINT or SIGTERM into a request, and the second into KeyboardInterrupt.

        Plain signal handlers rather than the event loop's: training runs in the main thread and blocks the loop.
        Outside the main thread signals cannot be handled, and are left alone.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            if self.requested:
                raise KeyboardInterrupt
            name = signal.Signals(number).name
            click.echo(f"\n{name}: finishing the current step and saving; once more stops at once", err=True)
            self.request()

        previous = {number: signal.signal(number, handle) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
