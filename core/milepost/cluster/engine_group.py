"""All engines as one `Engine`: requests are spread, answers come as they are ready."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from milepost.cluster.crew import GRACE_SECONDS, Call, Crew, Member, MemberLostError
from milepost.cluster.engine_host import GENERATE, Answer, Request
from milepost.cluster.failures import WorkerLostError
from milepost.cluster.messages import PlanMessage
from milepost.errors import TransportError
from milepost.rollout.engine import MemoryTag, SamplingParams
from milepost.samples import Sample, Task
from milepost.weights.transport import EngineInfo, PushReport

MAX_RESTARTS = 3
"""Deaths of one engine between two pushes after which the run stops."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A request that was not answered yet."""

    request: Request
    task: Task
    future: asyncio.Future[Sample]
    engine: int = -1


@dataclass(slots=True, eq=False)
class _Line:
    """What one engine has been asked."""

    index: int
    member: Member
    filled: bool = False
    """Whether it serves the group's version; one that was started in another's place does not."""
    deaths: int = 0
    """Of this engine's processes since the last push."""
    pending: dict[int, _Pending] = field(default_factory=dict)
    pump: asyncio.Task[None] | None = None


class EngineGroup:
    """Implements `milepost.rollout.engine.Engine` over engines in processes of their own.

    Requests made in one turn of the event loop travel together. Those of one prompt go to one engine, which prefills
    it once; the engine with the least to do gets the next prompt. With as many requests as a rollout makes at once, the
    same go to the same engines every time.

    An engine whose process dies is started again in its place, and while requests wait for it, it is filled alone with
    the weights that the others serve; then they run again. Where it dies between rollouts, the next push fills it. On a
    GPU that fill takes the actor's weights back to the device for as long as it lasts: a local engine's cache grows
    with what it serves and leaves room.

    Args:
        crew: the processes of the run.
        members: the engines' processes, replaceable ones.
        message: what they are built from.
        stall_timeout: seconds that engines may go without giving an answer.
        tell: is told what became of engines, in words.
    """

    def __init__(
        self,
        crew: Crew,
        members: Sequence[Member],
        message: PlanMessage,
        *,
        stall_timeout: float,
        tell: Callable[[str], object],
    ) -> None:
        self._crew = crew
        self._message = message
        self._tell = tell
        self._lines = [_Line(index, member) for index, member in enumerate(members)]
        self._infos: list[EngineInfo] = []
        self._connect: Callable[[Sequence[EngineInfo]], object]
        self._push: Callable[[int, Collection[int] | None], PushReport]
        self._refill: Callable[[int, int], object]
        self._stall_timeout = stall_timeout
        self._next_number = 0
        self._unsent: list[_Pending] = []
        self._cancelled: list[_Pending] = []
        self._version = -1
        self._turn = threading.Lock()
        """One engine is replaced or filled after the other, so that all ranks hear the same last."""

    def build(self) -> None:
        """Build and start all engines."""
        calls = [line.member.call("build", self._message, line.index) for line in self._lines]
        self._infos = self._crew.gather(calls, "build engine")

    def connect(
        self,
        connect: Callable[[Sequence[EngineInfo]], object],
        push: Callable[[int, Collection[int] | None], PushReport],
        refill: Callable[[int, int], object],
    ) -> None:
        """Let the ranks reach the engines.

        Args:
            connect: tells the ranks where engines are, anew whenever one was replaced.
            push: carries the actor's weights as a version to these engines, or to all.
            refill: does that for the engine of an index while the others generate (version, index).
        """
        self._connect, self._push, self._refill = connect, push, refill
        connect(self._infos)

    # Weights and deaths; these calls block, and some are made in threads.

    def push(self, version: int) -> PushReport:
        """Carry the actor's weights as this version to all engines, those included that have to be replaced first.

        Raises TransportError if one that lives did not commit, WorkerLostError if one has died too often.
        """
        while True:
            self._replace_dead()
            try:
                report = self._push(version, None)
                served = self._crew.gather([line.member.call("version") for line in self._lines], "version")
            except (TransportError, MemberLostError):
                if not self._replace_dead(GRACE_SECONDS):
                    raise
                continue
            self._version = min(served)
            for line in self._lines:
                line.filled, line.deaths = True, 0
            return report

    def _replace_dead(self, wait: float = 0.0) -> bool:
        """Replace the engines that died, waiting so long for a first one; return whether there were any."""
        dead = self._crew.dead([line.member for line in self._lines], wait)
        for line in self._lines:
            if line.member in dead:
                self._replace(line, f"{line.member.name} died")
        return bool(dead)

    def _replace(self, line: _Line, reason: str) -> None:
        """Start an engine in the place of one that died. Raises WorkerLostError if that was once too often."""
        line.filled = False
        while True:
            line.deaths += 1
            if line.deaths > MAX_RESTARTS:
                times = f"{line.member.name} died {line.deaths} times since the last push"
                raise WorkerLostError(f"{times}; the last time: {reason}")
            what = f"its {len(line.pending)} requests run again" if line.pending else "no request was running"
            count = f"death {line.deaths} of {MAX_RESTARTS} until the next push"
            self._tell(f"{reason.splitlines()[0]}; it is started again ({count}), {what}")
            try:
                with self._turn:
                    self._start_again(line)
                return
            except MemberLostError as error:
                reason = str(error)

    def _start_again(self, line: _Line) -> None:
        line.member = self._crew.replace(line.member)
        self._crew.identify([line.member])
        call = line.member.call("build", self._message, line.index)
        (self._infos[line.index],) = self._crew.gather([call], "build engine")
        self._connect(self._infos)

    def _fill(self, line: _Line) -> None:
        """Give an engine that was started again the weights that the others serve."""
        try:
            with self._turn:
                self._refill(self._version, line.index)
        except TransportError as error:
            if self._crew.dead([line.member], GRACE_SECONDS):
                raise MemberLostError(f"{line.member.name} died while it was filled: {error}", line.member) from error
            raise
        line.filled = True

    @property
    def version(self) -> int:
        """Version of the weights being served, by the engine that is furthest behind; -1 before the first push."""
        return self._version

    async def start(self) -> None:
        """Do nothing: engines start when they are built."""

    async def stop(self) -> None:
        """Shut the engines down; pending requests end with status ABORTED."""
        with suppress(MemberLostError):
            await self._on_all("stop")
        for pump in [line.pump for line in self._lines if line.pump is not None]:
            await asyncio.wait({pump})

    async def generate(self, task: Task, tokens: Sequence[int], params: SamplingParams, key: Sequence[int]) -> Sample:
        """Sample a continuation of `tokens`; see `milepost.rollout.engine.Engine`."""
        request = Request(self._next_number, np.asarray(tokens, np.int32), params, tuple(key))
        self._next_number += 1
        loop = asyncio.get_running_loop()
        pending = _Pending(request, task, loop.create_future())
        if not self._unsent:
            # Behind everything that is ready to run now, so that all of a rollout's requests go together.
            loop.call_soon(self._send)
        self._unsent.append(pending)
        try:
            return await pending.future
        except asyncio.CancelledError:
            if not self._cancelled:
                loop.call_soon(self._send_cancelled)
            self._cancelled.append(pending)
            raise

    def _send(self) -> None:
        """Spread what was asked since the last turn over the engines."""
        unsent, self._unsent = [p for p in self._unsent if not p.future.done()], []
        prompts: dict[bytes, int] = {}
        load = [len(line.pending) for line in self._lines]
        bunches: list[list[_Pending]] = [[] for _ in self._lines]
        for pending in unsent:
            prompt = pending.request.tokens.tobytes()
            if prompt not in prompts:
                prompts[prompt] = load.index(min(load))
            pending.engine = prompts[prompt]
            load[pending.engine] += 1
            bunches[pending.engine].append(pending)
        for line, bunch in zip(self._lines, bunches, strict=True):
            if not bunch:
                continue
            line.pending |= {pending.request.number: pending for pending in bunch}
            if line.pump is None or line.pump.done():
                submitted = self._submit(line, bunch) if line.filled else None
                line.pump = asyncio.ensure_future(self._pump(line, submitted))
            elif line.filled:
                self._submit(line, bunch)

    def _submit(self, line: _Line, bunch: Collection[_Pending]) -> Call:
        return line.member.call("submit", [pending.request for pending in bunch])

    def _send_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for index, line in enumerate(self._lines):
            numbers = [pending.request.number for pending in cancelled if pending.engine == index]
            for number in numbers:
                line.pending.pop(number, None)
            if numbers:
                line.member.call("cancel", numbers)

    async def _pump(self, line: _Line, submitted: Call | None) -> None:
        """Hand out an engine's answers as long as it owes any, whatever becomes of its process."""
        try:
            while line.pending:
                try:
                    if submitted is None:
                        if not line.filled:
                            await asyncio.to_thread(self._fill, line)
                        submitted = self._submit(line, line.pending.values())
                    await self._collect(line, submitted)
                except MemberLostError as error:
                    submitted = None
                    line.filled = False
                    await asyncio.to_thread(self._replace, line, str(error))
        except Exception as error:  # noqa: BLE001  whoever waits for an answer is told
            waiting, line.pending = line.pending, {}
            for pending in waiting.values():
                if not pending.future.done():
                    pending.future.set_exception(error)

    async def _collect(self, line: _Line, submitted: Call) -> None:
        heard = time.monotonic()
        await self._crew.gather_async([submitted], GENERATE)
        while line.pending:
            (answers,) = await self._crew.gather_async([line.member.call("collect")], GENERATE)
            if answers:
                heard = time.monotonic()
            elif time.monotonic() - heard > self._stall_timeout:
                raise self._crew.stalled(line.member, GENERATE)
            for answer in answers:
                self._resolve(line, answer)

    def _resolve(self, line: _Line, answer: Answer) -> None:
        pending = line.pending.pop(answer.number, None)
        if pending is None or pending.future.done():
            return  # cancelled while the answer was on its way
        if answer.failure is not None:
            pending.future.set_exception(self._crew.error(line.member, answer.failure))
        else:
            pending.future.set_result(answer.sample(pending.task))

    async def _on_all(self, method: str, *args: Any) -> list[Any]:
        """Call all engines."""
        return await self._crew.gather_async([line.member.call(method, *args) for line in self._lines], method)

    async def _on_living(self, method: str, *args: Any) -> None:
        """Call all engines; those that died meanwhile are replaced first, and what runs on one is its pump's."""
        while True:
            try:
                await self._on_all(method, *args)
            except MemberLostError as error:
                for line in self._lines:
                    if line.member is error.member and line.pending and line.pump is not None:
                        await asyncio.wait({line.pump})
                    elif line.member is error.member:
                        await asyncio.to_thread(self._replace, line, str(error))
            else:
                return

    async def abort(self) -> None:
        """End all running requests now; their samples come back with status ABORTED."""
        await self._on_living("abort")

    async def pause(self) -> None:
        """Stop decoding; requests are kept."""
        await self._on_living("pause")

    async def resume(self) -> None:
        """Go on decoding after `pause`."""
        await self._on_living("resume")

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        """Release the memory of these parts on all engines."""
        await self._on_living("sleep", tuple(tags))

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory of these parts back on all engines."""
        await self._on_living("wake", tuple(tags))

    async def healthy(self) -> bool:
        """Whether all engines answer."""
        try:
            return all(await self._on_all("healthy"))
        except MemberLostError:
            return False
