"""SGLang engines on Ray: one actor beside each server, on the server's node; the controller talks HTTP to servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import torch

from milepost.cluster.building import choose_dtype
from milepost.cluster.crew import START_SECONDS, Crew, Member
from milepost.cluster.sglang import (
    StartProgress,
    engine_arguments,
    engine_environment,
    let_refill,
    make_engine,
    make_pool,
    start_pool,
)
from milepost.cluster.slots import Slots
from milepost.cluster.trainer_group import TrainerGroup
from milepost.components import Transport
from milepost.config.plan import Plan
from milepost.rollout.sglang.pool import EnginePool, push_fenced
from milepost.tokenizer import Tokenizer
from milepost.weights.transport import EngineInfo, PushReport

WATCH_SECONDS = 1.0
"""How often a starting server's waiting time is told."""


class RemoteServer:
    """Implements `milepost.rollout.sglang.server.Server` with the `SGLangHost` of another process.

    Beside what the protocol says, every call raises WorkerLostError if any process of the run died.
    """

    def __init__(
        self,
        crew: Crew,
        member: Member,
        arguments: Mapping[str, Any],
        *,
        host: str,
        environment: Mapping[str, str],
        on_wait: Callable[[float], object],
    ) -> None:
        self._crew = crew
        self._member = member
        self._start = (dict(arguments), host, dict(environment))
        self._on_wait = on_wait
        self._endpoint: str | None = None

    @property
    def endpoint(self) -> str:
        """URL. Raises RuntimeError before the first start."""
        if self._endpoint is None:
            raise RuntimeError("the server was not started")
        return self._endpoint

    async def start(self) -> None:
        """Start and wait until it answers. Raises RunError with the end of its log if it does not."""
        limit = max(START_SECONDS, self._crew.stall_timeout)
        call = self._member.call("start", *self._start)
        starting = asyncio.ensure_future(self._crew.gather_async([call], "start server", timeout=limit))
        waited = 0.0
        try:
            while not (await asyncio.wait({starting}, timeout=WATCH_SECONDS))[0]:
                waited += WATCH_SECONDS
                self._on_wait(waited)
            [self._endpoint] = starting.result()
        finally:
            starting.cancel()

    async def stop(self) -> None:
        """Shut down, at the latest by force, with everything it started."""
        await self._ask("stop")

    async def alive(self) -> bool:
        """Whether its process is there."""
        there: bool = await self._ask("alive")
        return there

    async def log_tail(self) -> str:
        """Return the path of its log and the last lines."""
        text: str = await self._ask("log_tail")
        return text

    async def _ask(self, method: str) -> Any:
        [answer] = await self._crew.gather_async([self._member.call(method)], method)
        return answer


@asynccontextmanager
async def ray_sglang(
    plan: Plan, tokenizer: Tokenizer, crew: Crew, hosts: Sequence[Member], slots: Slots, trainer: TrainerGroup
) -> AsyncIterator[tuple[EnginePool, Callable[[int], PushReport]]]:
    """Start a server beside each host and connect it with the ranks; give their pool, and what pushes a version.

    Where this ends with an error, servers are left to the death of their hosts.
    """
    on_gpus = plan.config.cluster.gpus_per_node > 0
    device = torch.device("cuda" if on_gpus else "cpu")
    arguments = engine_arguments(plan, device.type, choose_dtype(plan.config.model.dtype, device))
    engines = []
    for index, member in enumerate(hosts):
        place = slots.of_engine(index)
        environment = engine_environment(plan)
        if on_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(slot.device for slot in place)
        server = RemoteServer(
            crew,
            member,
            arguments,
            host="127.0.0.1" if slots.one_machine else place[0].address,
            environment=environment,
            on_wait=StartProgress(index),
        )
        engines.append(make_engine(plan, tokenizer, server, arguments, index))
    pool = make_pool(plan, engines)
    try:
        await start_pool(plan, pool, trainer)
        infos = [
            EngineInfo(
                engine.index,
                engine.endpoint,
                _devices(slots, engine.index, trainer, on_gpus=on_gpus),
                plan.config.engine.gpus_per_engine,
                node=crew.node(member),
            )
            for engine, member in zip(engines, hosts, strict=True)
        ]
        transport: Transport = plan.transport.build()
        trainer.open_senders(replace(transport.open(trainer.world, infos), verify=plan.config.transport.verify))
        let_refill(plan, pool, trainer, trainer.push, trainer.memory)

        def push(version: int) -> PushReport:
            return push_fenced(pool, lambda present: trainer.push(version, present), version)

        yield pool, push
    except BaseException:
        await pool.leave()
        raise
    await pool.stop()


def _devices(slots: Slots, index: int, trainer: TrainerGroup, *, on_gpus: bool) -> tuple[str, ...]:
    """Return an engine's devices as ranks name theirs."""
    if not on_gpus:
        return ("cpu",)
    shared = slots.ranks_of_engine(index)
    if shared:
        return tuple(trainer.world.ranks[rank].device for rank in shared)
    return tuple(slot.uuid for slot in slots.of_engine(index))
