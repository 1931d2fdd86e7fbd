"""The launcher `ray`: one actor per trainer rank and one per engine, the controller stays where it was started.

A cluster is joined if RAY_ADDRESS names one, and started on this machine otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import click
import torch

from milepost.cluster.building import threads_per_process
from milepost.cluster.compute import Compute
from milepost.cluster.crew import Crew
from milepost.cluster.engine_group import EngineGroup
from milepost.cluster.engine_host import EngineHost
from milepost.cluster.host import Host
from milepost.cluster.messages import PlanMessage
from milepost.cluster.rank_host import RankHost
from milepost.cluster.ray_cluster import ray_cluster
from milepost.cluster.slots import placed, slots_of
from milepost.cluster.trainer_group import TrainerGroup
from milepost.components import Transport
from milepost.config.plan import Plan
from milepost.tokenizer import Tokenizer
from milepost.training.trainer import Part
from milepost.weights.transport import EngineInfo

WEIGHTS: tuple[Part, ...] = ("weights",)


@asynccontextmanager
async def ray_compute(plan: Plan, tokenizer: Tokenizer) -> AsyncIterator[Compute]:
    """Start ranks and engines, connect them, and free everything on the way out, whatever they are doing.

    Raises ConfigError if the cluster is too small, PluginError if a process finds other plugins than are here.
    """
    settings = plan.config.cluster
    message = PlanMessage.of(plan)
    if plan.config.run.threads is not None:
        torch.set_num_threads(plan.config.run.threads)  # the controller computes advantages
    with ray_cluster(slots_of(plan), plan.run_dir), placed(plan) as slots:
        crew = Crew(plan.run_dir, settings.stall_timeout)
        try:
            threads = threads_per_process(plan)
            ranks = [
                crew.add(RankHost, f"trainer-{rank}", threads, slots.rank(rank)) for rank in range(plan.world_size)
            ]
            sglang = plan.config.engine.backend == "sglang"
            host, place = (_sglang_host(), slots.server) if sglang else (EngineHost, slots.engine)
            engines = [
                crew.add(host, f"engine-{index}", threads, place(index), replaceable=not sglang)
                for index in range(plan.config.engine.num_engines or 1)
            ]
            crew.identify()
            trainer = TrainerGroup(crew, ranks)
            one_node = len({crew.node(member) for member in ranks}) == 1
            meeting = "127.0.0.1" if one_node else slots.rank_address(0)
            (port,) = crew.gather([ranks[0].call("open_store", meeting, settings.stall_timeout)], "open store")
            trainer.build(message, meeting, port)
            if sglang:
                from milepost.cluster.ray_sglang import ray_sglang

                async with ray_sglang(plan, tokenizer, crew, engines, slots, trainer) as (pool, push_all):
                    yield Compute(trainer, pool, push_all, trainer.memory)
                trainer.close()
                return
            engine = EngineGroup(
                crew,
                engines,
                message,
                stall_timeout=settings.stall_timeout,
                tell=lambda text: click.echo(text, err=True),
            )
            engine.build()
            transport: Transport = plan.transport.build()

            def connect(infos: Sequence[EngineInfo]) -> None:
                trainer.open_senders(replace(transport.open(trainer.world, infos), verify=plan.config.transport.verify))

            def refill(version: int, index: int) -> None:
                if not (plan.colocated and plan.config.trainer.offload):
                    trainer.push(version, [index])
                    return
                trainer.onload("actor", WEIGHTS)
                try:
                    trainer.push(version, [index])
                finally:
                    trainer.offload("actor", WEIGHTS)

            engine.connect(connect, trainer.push, refill)
            yield Compute(trainer, engine, engine.push, trainer.memory)
            await engine.stop()
            trainer.close()
        finally:
            crew.close()


def _sglang_host() -> type[Host]:
    """SGLang is an extra, and so is what talks to it."""
    from milepost.cluster.sglang_host import SGLangHost

    return SGLangHost
