"""The launcher `ray`: one actor per trainer rank and one per engine, the controller stays where it was started.

A cluster is joined if RAY_ADDRESS names one, and started on this machine otherwise.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import click
import ray
import torch
from ray.exceptions import GetTimeoutError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from milepost.cluster.building import threads_per_process
from milepost.cluster.compute import Compute
from milepost.cluster.crew import Crew
from milepost.cluster.engine_group import EngineGroup
from milepost.cluster.engine_host import EngineHost
from milepost.cluster.messages import PlanMessage
from milepost.cluster.rank_host import RankHost
from milepost.cluster.trainer_group import TrainerGroup
from milepost.components import Transport
from milepost.config.plan import Plan
from milepost.errors import ConfigError, Problem
from milepost.weights.transport import PushReport

PLACEMENT_SECONDS = 120.0
"""How long a cluster that is large enough may take to make room."""
_DASHBOARD_PARTS = ("aiohttp", "aiohttp_cors", "opencensus")
"""What `ray[default]` installs for the dashboard."""


@asynccontextmanager
async def ray_compute(plan: Plan) -> AsyncIterator[Compute]:
    """Start ranks and engines, connect them, and free everything on the way out, whatever they are doing.

    Raises ConfigError if the cluster is too small, PluginError if a process finds other plugins than are here.
    """
    settings = plan.config.cluster
    message = PlanMessage.of(plan)
    if plan.config.run.threads is not None:
        torch.set_num_threads(plan.config.run.threads)  # the controller computes advantages
    with _cluster(plan), _placed(plan) as slots:
        crew = Crew(plan.run_dir, settings.stall_timeout)
        try:
            threads = threads_per_process(plan)
            ranks = [
                crew.add(RankHost, f"trainer-{rank}", threads, slots.rank(rank)) for rank in range(plan.world_size)
            ]
            num_engines = plan.config.engine.num_engines or 1
            engines = [
                crew.add(EngineHost, f"engine-{index}", threads, slots.engine(index)) for index in range(num_engines)
            ]
            crew.identify()
            engine = EngineGroup(crew, engines, settings.stall_timeout)
            trainer = TrainerGroup(crew, ranks)
            one_node = len({crew.node(member) for member in ranks}) == 1
            host = "127.0.0.1" if one_node else slots.address(0)
            (port,) = crew.gather([ranks[0].call("open_store", host, settings.stall_timeout)], "open store")
            trainer.build(message, host, port)
            infos = engine.build(message)
            transport: Transport = plan.transport.build()
            address = replace(transport.open(trainer.world, infos), verify=plan.config.transport.verify)
            trainer.open_senders(address)

            def push(version: int) -> PushReport:
                report = trainer.push(version)
                engine.refresh_version()
                return report

            yield Compute(trainer, engine, push)
            await engine.stop()
            trainer.close()
        finally:
            crew.close()


@contextmanager
def _cluster(plan: Plan) -> Iterator[None]:
    """Join the cluster that RAY_ADDRESS names, or start one that is large enough for the plan.

    Raises ConfigError if there is no such cluster, or it does not let us in.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    address = os.environ.get("RAY_ADDRESS")
    dashboard = all(find_spec(part) for part in _DASHBOARD_PARTS)
    if not address:
        # As many slots as the plan takes, whatever the machine has: ranks beyond the cores take turns, and Ray starts
        # an idle process for every slot in advance.
        settings |= {"address": "local", "num_cpus": _num_slots(plan), "include_dashboard": dashboard}
    # Ray puts a handler of its own in the place of the one that makes SIGTERM finish the step and save.
    previous = signal.getsignal(signal.SIGTERM)
    try:
        context = ray.init(**settings)
    except ConnectionError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        message = f"the Ray cluster at RAY_ADDRESS={address} cannot be joined: {reason}"
        raise ConfigError([Problem("cluster.launcher", f"{message} Unset RAY_ADDRESS to start one here")]) from error
    try:
        signal.signal(signal.SIGTERM, previous)
        where = f"cluster at {address}" if address else "cluster started here"
        url = context.dashboard_url
        shown = f"dashboard http://{url}" if url else "no dashboard (pip install 'ray[default]' for one)"
        click.echo(f"ray: {where}, {shown}", err=True)
        yield
    finally:
        ray.shutdown()


@dataclass(frozen=True, slots=True)
class _Slots:
    """Where each rank and engine goes: bundles of a placement group, ordered by node and GPU."""

    group: Any
    bundles: Sequence[tuple[str, int]]
    """(node address, bundle index) of each slot."""
    num_ranks: int
    gpus: bool
    colocated: bool

    def address(self, slot: int) -> str:
        """Return the private address of a slot's node."""
        return self.bundles[slot][0]

    def rank(self, rank: int) -> dict[str, Any]:
        """Return the Ray options of a trainer rank."""
        return self._options(rank, 1.0, (0.5 if self.colocated else 1.0) if self.gpus else 0.0)

    def engine(self, index: int) -> dict[str, Any]:
        """Return the Ray options of an engine: on a rank's slot, or on one of its own."""
        slot = index % self.num_ranks if self.colocated else self.num_ranks + index
        return self._options(slot, 0.0, (0.5 if self.colocated else 1.0) if self.gpus else 0.0)

    def _options(self, slot: int, cpus: float, gpus: float) -> dict[str, Any]:
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.bundles[slot][1])
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}


def _num_slots(plan: Plan) -> int:
    """One slot per rank, and per engine where these have GPUs of their own."""
    settings = plan.config.cluster
    colocated = settings.colocate or settings.gpus_per_node == 0
    return plan.world_size + (0 if colocated else plan.config.engine.num_engines or 1)


@contextmanager
def _placed(plan: Plan) -> Iterator[_Slots]:
    """Reserve one bundle per rank, and per engine where these have GPUs of their own; give all back at the end."""
    gpus = plan.config.cluster.gpus_per_node > 0
    count = _num_slots(plan)
    bundle = {"CPU": 1.0, **({"GPU": 1.0} if gpus else {})}
    total = ray.cluster_resources()
    short = [f"{count} {name}s (it has {total.get(name, 0):g})" for name in bundle if total.get(name, 0) < count]
    if short:
        what = f"the Ray cluster is too small: the plan needs {' and '.join(short)}"
        raise ConfigError([Problem("cluster", f"{what}; take fewer ranks, or a larger cluster (RAY_ADDRESS)")])
    group = placement_group([bundle] * count, strategy="PACK")
    try:
        try:
            ray.get(group.ready(), timeout=PLACEMENT_SECONDS)
        except GetTimeoutError:
            what = f"the Ray cluster has no room for {count} x {bundle} within {PLACEMENT_SECONDS:g} s"
            raise ConfigError([Problem("cluster", f"{what}; free it, or use another (RAY_ADDRESS)")]) from None
        bundles = _order(group, count, gpus)
        yield _Slots(group, bundles, plan.world_size, gpus, colocated=count == plan.world_size)
    finally:
        remove_placement_group(group)


def _order(group: Any, count: int, gpus: bool) -> list[tuple[str, int]]:
    """Return (node address, bundle index) by node, and by GPU within one, so that neighbouring ranks are near."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    devices = dict.fromkeys(range(count), 0)
    if gpus:
        probe = ray.remote(_gpu_of_this_task)
        asked = [
            probe.options(
                num_cpus=0,
                num_gpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote()
            for index in range(count)
        ]
        devices = dict(enumerate(ray.get(asked)))
    order = sorted(range(count), key=lambda index: (addresses[nodes[index]], devices[index], index))
    return [(addresses[nodes[index]], index) for index in order]


def _gpu_of_this_task() -> int:
    return int(ray.get_gpu_ids()[0])
