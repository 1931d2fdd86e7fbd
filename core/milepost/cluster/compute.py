"""What the loop computes with, the same for every launcher: a trainer, an engine, and the way between them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace

from milepost.cluster.building import build_engine, build_trainer, prepare_process
from milepost.cluster.memory import Memory, read_memory
from milepost.components import Transport
from milepost.config.plan import Plan
from milepost.rollout.engine import Engine
from milepost.tokenizer import Tokenizer
from milepost.training.trainer import Trainer
from milepost.weights.transport import EngineInfo, PushReport


@dataclass(frozen=True, slots=True)
class Compute:
    """The parts of a run that compute."""

    trainer: Trainer
    """All ranks as one."""
    engine: Engine
    """All engines as one, started."""
    push: Callable[[int], PushReport]
    """Carries the actor's weights to all engines as the given version.

    Raises TransportError if an engine did not commit; that engine stays fenced.
    """
    memory: Callable[[], Sequence[Memory]]
    """Reads the memory of every rank's device."""


def launch(plan: Plan, tokenizer: Tokenizer) -> AbstractAsyncContextManager[Compute]:
    """Start what the plan computes with, in this process or on Ray; leaving the context frees it all."""
    if plan.config.cluster.launcher == "ray":
        if not os.environ.get("RAY_ADDRESS"):
            # A cluster that is started here asks for a token, and Ray reads whether to show one when it is imported.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
        # Ray is an extra that only its own launcher needs.
        from milepost.cluster.ray_launcher import ray_compute

        return ray_compute(plan, tokenizer)
    return inline_compute(plan, tokenizer)


@asynccontextmanager
async def inline_compute(plan: Plan, tokenizer: Tokenizer) -> AsyncIterator[Compute]:
    """Compute in this process: one rank, one engine (or SGLang servers beside it)."""
    device, dtype = prepare_process(plan, plan.config.run.threads)
    trainer = build_trainer(plan, device, dtype)

    def memory() -> Sequence[Memory]:
        return [read_memory(device)]

    try:
        if plan.config.engine.backend == "sglang":
            # SGLang is an extra, and so is what talks to it.
            from milepost.cluster.sglang import inline_sglang

            async with inline_sglang(plan, tokenizer, trainer, device, dtype) as (pool, pool_sender):

                def push_all(version: int) -> PushReport:
                    return pool_sender.push(version, trainer.source("actor"))

                yield Compute(trainer, pool, push_all, memory)
            return
        engine = build_engine(plan, tokenizer, device, dtype)
        await engine.start()
        try:
            transport: Transport = plan.transport.build()
            address = transport.open(trainer.world, [EngineInfo(0, engine.endpoint)])
            sender = transport.sender(replace(address, verify=plan.config.transport.verify), rank=0)

            def push(version: int) -> PushReport:
                return sender.push(version, trainer.source("actor"))

            yield Compute(trainer, engine, push, memory)
        finally:
            await engine.stop()
    finally:
        trainer.close()
