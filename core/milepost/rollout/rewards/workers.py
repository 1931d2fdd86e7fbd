"""Reward workers at work: each one driven by a thread that feeds it, watches its time limit and replaces it.

A thread rather than the controller's event loop, since that loop may be busy decoding while a limit runs out; the
thread asks the kernel for answers before it says that there were none in time.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from milepost.errors import RunError
from milepost.rollout.rewards.calls import DETAIL_LIMIT, Failure, FailureKind, Scope
from milepost.rollout.rewards.process import CappedLog, WorkerLostError, WorkerProcess
from milepost.rollout.rewards.wire import Answer, Message, ProtocolError, decode_answer, encode_calls
from milepost.samples import Sample

BATCH = 64
"""Calls sent to a worker in one message, at most."""
BATCH_TOKENS = 1 << 16
"""Tokens after which a message gets no further call: writing it must not hold the controller up."""
OVERLAP = 64
"""Calls of an asynchronous reward that one worker runs at a time."""
FRUITLESS_LIMIT = 5
"""Workers that may end in a row without an answer, and without a call to blame for it."""
GRACE = 1.0
"""Seconds beyond its own limit that a worker with an asynchronous reward gets to cancel a call itself."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of a reward: a sample, or a group."""

    samples: Sequence[Sample]
    future: Future[tuple[Answer | RunError, float]] = field(default_factory=Future)
    """Becomes the answer (a RunError if the pool is broken or closed) and the seconds it took."""
    suspect: bool = False
    """Was running, among others, when a worker was lost: it runs alone the next time, to find the one to blame."""
    wanted: bool = True
    """Set to False by who no longer waits for the answer; the call is dropped at the next occasion."""
    sent: float = 0.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """What a worker says of its reward once it is built."""

    scope: Scope
    asynchronous: bool


class WorkerPool:
    """Worker processes and the queue they are fed from. Its methods may be called from any thread."""

    def __init__(self, setup: Message, *, workers: int, timeout: float, log_dir: Path) -> None:
        """`setup` is the first line each worker gets; `timeout` is in seconds per call. Nothing runs before `start`."""
        self.ready: Future[Readiness | RunError] = Future()
        """Done when every worker is up, or with the RunError that kept one from it."""
        self.restarts = 0
        """Workers lost and replaced so far."""
        self._lock = threading.Lock()
        self._queue: deque[Call] = deque()
        self._error: RunError | None = None
        self._starting = workers
        self._drivers = [_Driver(self, setup, timeout, log_dir / f"reward-{index}.log") for index in range(workers)]

    def start(self) -> None:
        """Start the workers; `ready` tells when they are up."""
        for driver in self._drivers:
            driver.start()

    def submit(self, calls: Sequence[Call]) -> None:
        """Queue calls; each one's future will hold its answer."""
        with self._lock:
            error = self._error
            if error is None:
                self._queue.extend(calls)
        if error is not None:
            _settle(calls, error)
        self._wake()

    def close(self) -> None:
        """Kill the workers and everything they started; what is not answered by then becomes a RunError."""
        self.fail(RunError("the reward workers were closed before this was scored"))
        for driver in self._drivers:
            if driver.ident is not None:
                driver.join()
            driver.release()

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.pid for driver in self._drivers if (worker := driver.worker) is not None]

    # What follows is for the drivers.

    @property
    def error(self) -> RunError | None:
        """Why the pool has stopped; None while it works."""
        return self._error

    def take(self, *, room: int, idle: bool) -> list[Call]:
        """Hand out at most `room` queued calls, less if that leaves more for other workers.

        A suspect goes alone, to an idle worker. Calls that nobody waits for any more are dropped.
        """
        taken: list[Call] = []
        tokens = 0
        with self._lock:
            share = 2 * len(self._drivers) if len(self._drivers) > 1 else 1
            room = min(room, -(-len(self._queue) // share))
            while self._queue and len(taken) < room and tokens < BATCH_TOKENS:
                call = self._queue[0]
                if call.wanted and call.suspect and (taken or not idle):
                    break
                self._queue.popleft()
                if not call.wanted:
                    continue
                taken.append(call)
                tokens += sum(map(len, call.samples))
                if call.suspect:
                    break
        return taken

    def put_back(self, calls: Sequence[Call]) -> None:
        """Queue calls again, before all others and in their order."""
        with self._lock:
            error = self._error
            if error is None:
                self._queue.extendleft(reversed(calls))
        if error is not None:
            _settle(calls, error)
        self._wake()

    def worker_ready(self, ready: Readiness) -> None:
        """One worker is up."""
        with self._lock:
            self._starting -= 1
            if self._starting == 0 and not self.ready.done():
                self.ready.set_result(ready)

    def worker_lost(self) -> None:
        """One worker goes and another takes its place; said before any call is settled for it, so that counts agree."""
        with self._lock:
            self.restarts += 1

    def fail(self, error: RunError) -> None:
        """Stop the pool: `error` is the answer to everything queued now or later. The first error stays."""
        with self._lock:
            self._error = self._error or error
            calls = list(self._queue)
            self._queue.clear()
            if not self.ready.done():
                self.ready.set_result(self._error)
        _settle(calls, self._error)
        self._wake()

    def _wake(self) -> None:
        for driver in self._drivers:
            driver.wake()


class _Driver(threading.Thread):
    """Keeps one worker running and busy."""

    def __init__(self, pool: WorkerPool, setup: Message, timeout: float, log_path: Path) -> None:
        super().__init__(name=log_path.stem, daemon=True)
        self.worker: WorkerProcess | None = None
        self._pool = pool
        self._setup = setup
        self._timeout = timeout
        self._log_path = log_path
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._rung = False
        self._numbers = itertools.count()
        self._flight: dict[int, Call] = {}
        self._progress = 0.0
        self._asynchronous = False
        self._unfit = False
        self._fruitless = 0

    def wake(self) -> None:
        """End the wait the thread is in; ringing again before it has come to the bell would only cost."""
        if self._rung:
            return
        self._rung = True
        # A full buffer wakes it as well, and after `release` there is nothing to wake.
        with contextlib.suppress(OSError):
            self._ringer.send(b"!")

    def release(self) -> None:
        """Free the descriptors, once the thread has ended."""
        self._bell.close()
        self._ringer.close()

    def run(self) -> None:
        """Start a worker, serve with it, and replace it whenever it is lost, until the pool stops."""
        try:
            log = CappedLog(self._log_path)
            try:
                for attempt in itertools.count():
                    self._one_worker(log, first=attempt == 0)
                    if self._pool.error is not None:
                        break
                    self._fruitless += 1
                    if self._fruitless == FRUITLESS_LIMIT:
                        raise RunError(
                            f"{FRUITLESS_LIMIT} reward workers in a row ended by themselves before they answered "
                            f"anything; the end of {log.path}:\n{log.shown()}"
                        )
            finally:
                log.close()
        except RunError as error:
            self._pool.fail(error)
        except Exception as error:
            # Nobody may wait for ever because a driver is gone.
            self._pool.fail(RunError(f"the thread that drives a reward worker failed: {error!r}"))
            raise
        finally:
            _settle(self._flight.values(), self._pool.error or RunError("a reward worker's thread ended"))

    def _one_worker(self, log: CappedLog, *, first: bool) -> None:
        """Serve with one worker until it is lost or the pool stops."""
        self._unfit = False
        worker = self.worker = WorkerProcess(self._setup, log, self._bell.fileno())
        try:
            ready = self._wait_ready(worker)
            if ready is None:
                return
            self._asynchronous = ready.asynchronous
            if first:
                self._pool.worker_ready(ready)
            self._serve(worker)
        except WorkerLostError as lost:
            self._pool.worker_lost()
            detail = f"the worker process was lost: {lost}\nthe end of {log.path}:\n{log.shown()}"
            flight = list(self._flight.values())
            self._blame(flight if self._asynchronous else flight[:1], "crash", detail)
        finally:
            self.worker = None
            worker.kill()

    def _wait_ready(self, worker: WorkerProcess) -> Readiness | None:
        while self._pool.error is None:
            ready = worker.wait_ready()
            if ready is not None:
                return Readiness(**ready)
            self._silence()
        return None

    def _serve(self, worker: WorkerProcess) -> None:
        """Feed a worker and pass its answers on; return when it has to be replaced or the pool stops."""
        while self._pool.error is None:
            self._feed(worker)
            before = time.monotonic()
            messages, woken = worker.wait(self._time_left(before))
            if woken:
                self._silence()
            for message in messages:
                self._accept(message)
            if self._unfit:
                self._blame([], "memory", "")
                return
            if late := self._late(before):
                stack = worker.stack()
                self._pool.worker_lost()
                self._blame(late, "timeout", f"no score within {self._timeout:g} s; where it was then:\n{stack}")
                return

    def _feed(self, worker: WorkerProcess) -> None:
        if any(call.suspect for call in self._flight.values()):
            return
        while (room := self._room()) > 0 and (calls := self._pool.take(room=room, idle=not self._flight)):
            if not worker.is_alive():
                self._pool.put_back(calls)
                raise WorkerLostError("it ended between two calls")
            numbered = dict(zip(self._numbers, calls, strict=False))
            try:
                line = encode_calls([(number, call.samples) for number, call in numbered.items()])
            except RunError as error:
                _settle(calls, error)
                continue
            self._progress = time.monotonic()
            for call in calls:
                call.sent = self._progress
            self._flight |= numbered
            worker.send(line)

    def _room(self) -> int:
        if self._asynchronous:
            return OVERLAP - len(self._flight)
        return 0 if self._flight else BATCH

    def _accept(self, message: Message) -> None:
        """Pass an answer on, and note whether it leaves the worker unfit for more."""
        samples = {number: call.samples for number, call in self._flight.items()}
        try:
            number, answer, seconds = decode_answer(message, samples)
        except ProtocolError as error:
            raise WorkerLostError(str(error)) from error
        self._progress = time.monotonic()
        self._fruitless = 0
        # After a failed allocation a worker may be left with next to no room.
        if isinstance(answer, Failure) and answer.kind == "memory" and not self._unfit:
            self._unfit = True
            self._pool.worker_lost()
        _settle([self._flight.pop(number)], answer, seconds)

    def _time_left(self, now: float) -> float:
        return min((limit - now for limit in self._limits().values()), default=60.0)

    def _late(self, now: float) -> list[Call]:
        """Calls in flight that were over their limit at time `now`."""
        return [self._flight[number] for number, limit in self._limits().items() if limit <= now]

    def _limits(self) -> dict[int, float]:
        """When time is up for the calls that run."""
        if self._asynchronous:
            return {number: call.sent + self._timeout + GRACE for number, call in self._flight.items()}
        return dict.fromkeys(itertools.islice(self._flight, 1), self._progress + self._timeout)

    def _blame(self, suspects: Sequence[Call], kind: FailureKind, detail: str) -> None:
        """A worker goes: settle the call that is to blame for it, and queue again what else was in flight."""
        flight = list(self._flight.values())
        self._flight.clear()
        if len(suspects) == 1:
            (guilty,) = suspects
            flight.remove(guilty)
            self._fruitless = 0
            since = guilty.sent if self._asynchronous else self._progress
            _settle([guilty], Failure(kind, detail[:DETAIL_LIMIT]), time.monotonic() - since)
        else:
            for call in suspects:
                call.suspect = True
        self._pool.put_back(flight)

    def _silence(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass
        # In this order: who finds the bell rung need not ring, since the thread looks at the queue after this.
        self._rung = False


def _settle(calls: Iterable[Call], answer: Answer | RunError, seconds: float = 0.0) -> None:
    for call in calls:
        # A future that its waiter has cancelled takes no result.
        if call.future.set_running_or_notify_cancel():
            call.future.set_result((answer, seconds))
