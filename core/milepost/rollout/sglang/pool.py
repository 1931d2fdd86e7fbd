"""Several SGLang engines as one: requests are spread, and an engine that dies is replaced while the others go on."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from typing import Any

from milepost.errors import EngineGone, MilepostError, RunError, TransportError
from milepost.rollout.engine import MemoryTag, SamplingParams
from milepost.rollout.sglang.engine import EngineLost, SGLangEngine, make_sample
from milepost.samples import Sample, Status, Task
from milepost.weights.transport import PushReport, Sender, WeightSource

Refill = Callable[[int], Awaitable[PushReport | None]]
"""Pushes the pool's version to the engine of this index alone, while the others may be generating.

Gives None if there is no memory for it now; the engine then waits for the next push to all.
"""

SLACK = 8
"""Requests by which a prompt's own engine may exceed the least loaded one before a request goes there."""

REMEMBERED_PROMPTS = 65536
MAX_RESTARTS = 3
"""Deaths of one engine between two pushes after which the run stops."""

MAX_TRIES = 3
"""Engines that one request may take down before it counts as the cause."""

MONITOR_SECONDS = 5.0
UNHEALTHY_LIMIT = 3
"""Failed probes in a row after which an engine that is still there counts as lost."""


class EnginePool:
    """Implements `milepost.rollout.engine.Engine` with several engines.

    Requests of one task go to one engine, whose cache holds their prompt; tasks go where the fewest requests are. An
    engine that dies is fenced and its requests run again on another, or wait. While the pool is awake it is started
    again at once and refilled alone; while it sleeps, at the next `wake`, so that it never takes memory that the
    trainer is using. An engine that hangs counts as dead.
    """

    def __init__(
        self,
        engines: Sequence[SGLangEngine],
        *,
        on_event: Callable[[str], object] | None = None,
        stall_timeout: float = math.inf,
    ) -> None:
        """`on_event` is told what became of engines, in words.

        `stall_timeout` is how many seconds an engine may have requests without answering any.
        """
        if not engines:
            raise ValueError("a pool needs at least one engine")
        self.engines = tuple(engines)
        self.refill: Refill | None = None
        """Set before engines can be replaced; without it, a death in mid-rollout stops the run."""
        self._tell = on_event or (lambda text: None)
        self._homes: OrderedDict[int, int] = OrderedDict()
        """Task to the engine its requests go to."""
        self._lost: set[int] = set()
        self._deaths = dict.fromkeys(range(len(engines)), 0)
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._failure: BaseException | None = None
        self._deferred: set[int] = set()
        """Engines that were started again and wait for the next push to all."""
        self._stall_timeout = stall_timeout
        self._heard = dict.fromkeys(range(len(engines)), 0.0)
        """When each engine last answered, or was asked the first of its requests."""
        self._paused = False
        self._ending: asyncio.Task[None] | None = None
        self._asleep: set[MemoryTag] = set()
        self._epoch = 0
        self._changed = asyncio.Event()
        self._monitor: asyncio.Task[None] | None = None
        self._version = -1

    # State

    @property
    def version(self) -> int:
        """Version all engines serve; -1 before the first push."""
        return self._version

    @property
    def num_pending(self) -> int:
        """Requests that have no answer yet."""
        return sum(engine.num_pending for engine in self.engines)

    async def start(self) -> None:
        """Start all engines. Raises RunError, with the end of its log, if one does not come up; none is then left."""
        try:
            await _together(engine.start() for engine in self.engines)
        except BaseException:
            await self.stop()
            raise
        self._monitor = asyncio.get_running_loop().create_task(self._watch(), name="watch engines")
        self._monitor.add_done_callback(self._watched)

    async def stop(self) -> None:
        """Shut all engines down."""
        await self._end_tasks()
        await _together(engine.stop() for engine in self.engines)

    async def leave(self) -> None:
        """End everything here and leave the servers to whoever else ends them."""
        await self._end_tasks()
        await _together(engine.disconnect() for engine in self.engines)

    async def _end_tasks(self) -> None:
        running = [*self._restarts.values(), *(task for task in (self._monitor, self._ending) if task is not None)]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._restarts.clear()
        self._monitor = self._ending = None

    async def healthy(self) -> bool:
        """Whether every engine answers."""
        return all(await asyncio.gather(*(engine.healthy() for engine in self.engines)))

    # Weights

    def fence(self, engines: Collection[int] | None = None) -> tuple[int, ...]:
        """Let these engines (default all) take no requests; return those that are there to be pushed to.

        Raises RuntimeError if requests are pending on one of them.
        """
        wanted = range(len(self.engines)) if engines is None else engines
        present = tuple(index for index in wanted if index not in self._lost)
        for index in present:
            self.engines[index].fence()
        return present

    def committed(self, version: int, engines: Collection[int]) -> None:
        """A push of this version has gone through whole on these engines: serve it."""
        if version != self._version:
            self._version = version
            self._deaths = dict.fromkeys(self._deaths, 0)
        for index in engines:
            self.engines[index].committed(version)
        self._deferred.difference_update(engines)
        self._pulse()

    def gone(self, endpoint: str, error: BaseException) -> None:
        """Note that the engine at an endpoint died in a push. Raises `error` if the pool has none there to lose."""
        for engine in self.engines:
            if engine.endpoint == endpoint and engine.index not in self._lost:
                self._lose(engine.index, error)
                return
        raise error

    # Control

    async def abort(self) -> None:
        """End all requests now; their samples come back with status ABORTED."""
        self._epoch += 1
        self._pulse()
        await self._each(lambda engine: engine.abort())

    async def pause(self) -> None:
        """Stop decoding; requests are kept."""
        self._paused = True
        await self._each(lambda engine: engine.pause())

    async def resume(self) -> None:
        """Go on decoding after `pause`."""
        await self._each(lambda engine: engine.resume())
        now = time.monotonic()
        self._heard = dict.fromkeys(self._heard, now)
        self._paused = False

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        """Release the memory of these parts, be they none; engines that are being started again finish that first."""
        await asyncio.gather(*self._restarts.values())
        self._asleep.update(tags)
        if "weights" in tags or "kv_cache" in tags:
            self._homes.clear()
        await self._each(lambda engine: engine.sleep(tags))

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory of these parts back; engines that died meanwhile are started again.

        Raises RunError if one cannot be.
        """
        self._raise_failure()
        self._asleep.difference_update(tags)
        await self._each(lambda engine: engine.wake(tags))
        for index in sorted(self._lost - self._restarts.keys()):
            if not self._asleep:  # the push is over: this one needs one of its own
                self._begin_replacing(index)
                continue
            # The push is still to come. What sleeps on the others until then sleeps on a fresh one, too.
            await self._start_again(index)
            await self.engines[index].sleep(tuple(self._asleep))
            self._lost.discard(index)

    async def _each(self, act: Callable[[SGLangEngine], Coroutine[Any, Any, None]]) -> None:
        """Do something with every engine that is there; one that dies of it is lost like any other."""

        async def one(engine: SGLangEngine) -> None:
            try:
                await act(engine)
            except EngineLost as error:
                self._lose(engine.index, error)

        await _together(one(engine) for engine in self.engines if engine.index not in self._lost)

    # Generation

    async def generate(self, task: Task, tokens: Sequence[int], params: SamplingParams, key: Sequence[int]) -> Sample:
        """Sample a continuation of `tokens` on one of the engines; see `milepost.rollout.engine.Engine`."""
        epoch = self._epoch
        for _ in range(MAX_TRIES):
            engine = await self._choose(task, epoch)
            if engine is None:
                return make_sample(task, tokens, [], [], self._version, Status.ABORTED, str)
            if not engine.num_pending:
                self._heard[engine.index] = time.monotonic()
            try:
                sample = await engine.generate(task, tokens, params, key)
            except EngineLost as error:
                last = error
                self._lose(engine.index, error)
            else:
                self._heard[engine.index] = time.monotonic()
                return sample
        self._raise_failure()
        raise RunError(f"{MAX_TRIES} engines were lost while a request of task {task.index} ran: {last}")

    async def _choose(self, task: Task, epoch: int) -> SGLangEngine | None:
        """Return the engine for a request, waiting for one if all are lost; None if it was aborted meanwhile.

        Raises RunError if the last of them waits for the next push, RuntimeError if none takes requests for another
        reason and none is on its way.
        """
        while True:
            self._raise_failure()
            if epoch != self._epoch:
                return None
            serving = [engine for engine in self.engines if engine.serving and engine.index not in self._lost]
            if serving:
                return self._least_loaded(task, serving)
            if not self._restarts:
                if self._deferred:
                    raise RunError(
                        f"no engine is left to generate: {self._listed(self._deferred)} cannot be refilled before the "
                        "next push, because there is no memory for the trainer's weights beside the engines; a "
                        "smaller engine.options.mem_fraction_static leaves some"
                    )
                state = f"{' and '.join(sorted(self._asleep))} asleep" if self._asleep else "fenced; push weights first"
                raise RuntimeError(f"no engine takes requests: {state}")
            self._changed.clear()
            await self._changed.wait()

    def _least_loaded(self, task: Task, serving: Sequence[SGLangEngine]) -> SGLangEngine:
        least = min(serving, key=lambda engine: engine.num_pending)
        home = self._homes.get(task.index)
        for engine in serving:
            if engine.index == home and engine.num_pending <= 2 * least.num_pending + SLACK:
                return engine
        self._homes[task.index] = least.index
        self._homes.move_to_end(task.index)
        if len(self._homes) > REMEMBERED_PROMPTS:
            self._homes.popitem(last=False)
        return least

    # Deaths

    def _lose(self, index: int, error: BaseException) -> None:
        """Note that an engine is gone; begin to start it again if the pool is awake."""
        if index in self._lost:
            return
        self._lost.add(index)
        if self._failure is not None:
            return
        self._deaths[index] += 1
        self._tell(f"engine {index} is lost: {error}")
        if not self._asleep:
            self._begin_replacing(index)

    def _begin_replacing(self, index: int) -> None:
        restart = asyncio.get_running_loop().create_task(self._replace(index), name=f"restart engine {index}")
        self._restarts[index] = restart

    async def _replace(self, index: int) -> None:
        """Start an engine again and fill it with the current weights; a failure is the pool's."""
        try:
            while index in self._lost:
                await self._start_again(index)
                if self.refill is None:
                    raise RunError(f"engine {index} was lost in a rollout, and nothing can refill it alone")
                self._lost.discard(index)
                try:
                    report = await self.refill(index)
                    if report is None:
                        self._deferred.add(index)
                        self._tell(f"engine {index} waits for the next push: there is no memory for a refill now")
                        return
                    self.committed(report.version, report.engines)
                except (EngineLost, TransportError) as error:
                    if await self.engines[index].server.alive():
                        raise
                    self._lost.add(index)
                    self._deaths[index] += 1
                    self._tell(f"engine {index} is lost: {error}")
            self._tell(f"engine {index} serves version {self._version} again")
        except Exception as error:  # noqa: BLE001 whatever it was, it is raised to whoever waits for an engine
            self.fail(error)
        finally:
            del self._restarts[index]
            self._pulse()

    async def _start_again(self, index: int) -> None:
        engine = self.engines[index]
        if self._deaths[index] > MAX_RESTARTS:
            raise RunError(
                f"engine {index} died {self._deaths[index]} times since the last push\n{await engine.server.log_tail()}"
            )
        self._tell(f"engine {index} is started again")
        await engine.start()

    def fail(self, error: BaseException) -> None:
        """End all requests with an error, those to come too: the pool cannot go on."""
        if self._failure is None:
            self._failure = error
            work = _together(engine.disconnect() for engine in self.engines)
            self._ending = asyncio.get_running_loop().create_task(work, name="end all requests")
        self._pulse()

    def _raise_failure(self) -> None:
        error = self._failure
        if isinstance(error, MilepostError) and error.exit_code != RunError.exit_code:
            raise error  # it is not the engines that failed
        if error is not None:
            raise RunError(f"an engine could not be replaced: {error}") from error

    @staticmethod
    def _listed(indices: Collection[int]) -> str:
        return " and ".join(f"engine {index}" for index in sorted(indices))

    async def _watch(self) -> None:
        """Notice engines that die, or hang, while no request runs on them."""
        failed = dict.fromkeys(range(len(self.engines)), 0)
        while True:
            await asyncio.sleep(MONITOR_SECONDS)
            for engine in self.engines:
                if engine.index in self._lost or self._asleep:
                    failed[engine.index] = 0
                    continue
                if not await engine.server.alive():
                    self._lose(engine.index, EngineLost("its process ended"))
                    continue
                silent = time.monotonic() - self._heard[engine.index]
                if engine.num_pending and not self._paused and silent > self._stall_timeout:
                    limit = f"cluster.stall_timeout ({self._stall_timeout:g} s)"
                    message = f"none of its {engine.num_pending} requests was answered within {limit}"
                    self._lose(engine.index, EngineLost(message))
                    continue
                failed[engine.index] = 0 if await engine.healthy() else failed[engine.index] + 1
                if failed[engine.index] >= UNHEALTHY_LIMIT and engine.index not in self._lost:
                    self._lose(engine.index, EngineLost(f"it failed {UNHEALTHY_LIMIT} health checks in a row"))

    def _watched(self, monitor: asyncio.Task[None]) -> None:
        """A monitor that cannot go on is as good as a pool that cannot."""
        if not monitor.cancelled() and (error := monitor.exception()) is not None:
            self.fail(error)

    def _pulse(self) -> None:
        """Wake whoever waits for an engine."""
        self._changed.set()


def push_fenced(
    pool: EnginePool,
    push: Callable[[Collection[int]], PushReport],
    version: int,
    engines: Collection[int] | None = None,
) -> PushReport:
    """Fence these engines (default all), let `push` carry a version to those that are there, and serve it.

    `push` returns when every engine has committed. An engine that dies meanwhile is left out, to be replaced and
    refilled alone. Raises TransportError if one that lives did not commit; the engines then stay fenced.
    """
    while True:
        present = pool.fence(engines)
        try:
            report = push(present)
        except EngineGone as error:
            pool.gone(error.endpoint, error)
            continue
        pool.committed(version, report.engines)
        return report


class PoolSender:
    """Implements `milepost.weights.transport.Sender`: pushes through another one, and fences the pool meanwhile.

    It belongs to the controller; `push` of what it wraps returns when every engine has committed.
    """

    def __init__(self, sender: Sender, pool: EnginePool) -> None:
        self._sender = sender
        self._pool = pool

    def push(self, version: int, source: WeightSource, engines: Collection[int] | None = None) -> PushReport:
        """Push as `push_fenced` does."""
        return push_fenced(self._pool, lambda present: self._sender.push(version, source, present), version, engines)


async def _together(work: Any) -> None:
    """Run coroutines together; wait for all, then raise the first failure."""
    for result in await asyncio.gather(*work, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
