"""All engines as one `Engine`: requests are spread, answers come as they are ready."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from milepost.cluster.crew import Crew, Member
from milepost.cluster.engine_host import GENERATE, Answer, Request
from milepost.cluster.messages import PlanMessage
from milepost.rollout.engine import MemoryTag, SamplingParams
from milepost.samples import Sample, Task
from milepost.weights.transport import EngineInfo


@dataclass(slots=True, eq=False)
class _Pending:
    """A request that was not answered yet."""

    request: Request
    task: Task
    future: asyncio.Future[Sample]
    engine: int = -1


@dataclass(slots=True)
class _Line:
    """What one engine has been asked."""

    member: Member
    pending: dict[int, _Pending] = field(default_factory=dict)
    pump: asyncio.Task[None] | None = None


class EngineGroup:
    """Implements `milepost.rollout.engine.Engine` over engines in processes of their own.

    Requests made in one turn of the event loop travel together. Those of one prompt go to one engine, which prefills
    it once; the engine with the least to do gets the next prompt. With as many requests as a rollout makes at once, the
    same go to the same engines every time.
    """

    def __init__(self, crew: Crew, members: Sequence[Member], stall_timeout: float) -> None:
        self._crew = crew
        self._lines = [_Line(member) for member in members]
        self._stall_timeout = stall_timeout
        self._next_number = 0
        self._unsent: list[_Pending] = []
        self._cancelled: list[_Pending] = []
        self._version = -1

    def build(self, message: PlanMessage) -> list[EngineInfo]:
        """Build and start all engines; return where they are."""
        calls = [line.member.call("build", message, index) for index, line in enumerate(self._lines)]
        infos: list[EngineInfo] = self._crew.gather(calls, "build engine")
        return infos

    @property
    def version(self) -> int:
        """Version of the weights being served, by the engine that is furthest behind; -1 before the first push."""
        return self._version

    def refresh_version(self) -> None:
        """Ask the engines what they serve, after a push."""
        self._version = min(self._crew.gather([line.member.call("version") for line in self._lines], "version"))

    async def start(self) -> None:
        """Do nothing: engines start when they are built."""

    async def stop(self) -> None:
        """Shut the engines down; pending requests end with status ABORTED."""
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
            call = line.member.call("submit", [pending.request for pending in bunch])
            if line.pump is None or line.pump.done():
                line.pump = asyncio.ensure_future(self._pump(line, call))

    def _send_cancelled(self) -> None:
        cancelled, self._cancelled = self._cancelled, []
        for index, line in enumerate(self._lines):
            numbers = [pending.request.number for pending in cancelled if pending.engine == index]
            for number in numbers:
                line.pending.pop(number, None)
            if numbers:
                line.member.call("cancel", numbers)

    async def _pump(self, line: _Line, submitted: tuple[Member, Any]) -> None:
        """Hand out an engine's answers as long as it owes any."""
        heard = time.monotonic()
        try:
            await self._crew.gather_async([submitted], GENERATE)
            while line.pending:
                (answers,) = await self._crew.gather_async([line.member.call("collect")], GENERATE)
                if answers:
                    heard = time.monotonic()
                elif time.monotonic() - heard > self._stall_timeout:
                    raise self._crew.stalled(line.member, GENERATE)
                for answer in answers:
                    self._resolve(line, answer)
        except Exception as error:  # noqa: BLE001  whoever waits for an answer is told
            waiting, line.pending = line.pending, {}
            for pending in waiting.values():
                if not pending.future.done():
                    pending.future.set_exception(error)

    def _resolve(self, line: _Line, answer: Answer) -> None:
        pending = line.pending.pop(answer.number, None)
        if pending is None or pending.future.done():
            return  # cancelled while the answer was on its way
        if answer.failure is not None:
            pending.future.set_exception(self._crew.error(line.member, answer.failure))
        else:
            pending.future.set_result(answer.sample(pending.task))

    async def _on_all(self, method: str, *args: Any) -> list[Any]:
        return await self._crew.gather_async([line.member.call(method, *args) for line in self._lines], method)

    async def abort(self) -> None:
        """End all running requests now; their samples come back with status ABORTED."""
        await self._on_all("abort")

    async def pause(self) -> None:
        """Stop decoding; requests are kept."""
        await self._on_all("pause")

    async def resume(self) -> None:
        """Go on decoding after `pause`."""
        await self._on_all("resume")

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        """Release the memory of these parts on all engines."""
        await self._on_all("sleep", tuple(tags))

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory of these parts back on all engines."""
        await self._on_all("wake", tuple(tags))

    async def healthy(self) -> bool:
        """Whether all engines answer."""
        return all(await self._on_all("healthy"))
