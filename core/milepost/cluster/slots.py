"""Room for a run on a Ray cluster: a placement group of one bundle per slot, ordered by node and GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from milepost.cluster.placement import Assignment, Machine, Slot, assign, num_slots, order_slots, shortage
from milepost.config.plan import Plan
from milepost.errors import ConfigError, Problem

PLACEMENT_SECONDS = 120.0
"""How long a cluster that is large enough may take to make room."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Where each rank and engine goes."""

    group: Any
    """Ray's placement group."""
    slots: Sequence[Slot]
    assignment: Assignment
    rank_gpus: float
    """Share of its slot's GPU that a rank, or an engine in a process of Ray's, is given."""

    def rank(self, rank: int) -> dict[str, Any]:
        """Return the Ray options of a trainer rank."""
        return self._options(self.assignment.ranks[rank], cpus=1.0, gpus=self.rank_gpus)

    def engine(self, index: int) -> dict[str, Any]:
        """Return the Ray options of an engine that computes in a process of Ray's."""
        return self._options(self.assignment.engines[index][0], cpus=0.0, gpus=self.rank_gpus)

    def server(self, index: int) -> dict[str, Any]:
        """Return the Ray options of the process beside an engine's server; it takes nothing but its place."""
        return self._options(self.assignment.engines[index][0], cpus=0.0, gpus=0.0)

    def rank_address(self, rank: int) -> str:
        """Return the private address of a rank's node."""
        return self.slots[self.assignment.ranks[rank]].address

    def of_engine(self, index: int) -> list[Slot]:
        """Return the slots of an engine."""
        return [self.slots[slot] for slot in self.assignment.engines[index]]

    def ranks_of_engine(self, index: int) -> list[int]:
        """Return the ranks that share an engine's slots; none where it has its own."""
        return [rank for rank, slot in enumerate(self.assignment.ranks) if slot in self.assignment.engines[index]]

    @property
    def one_machine(self) -> bool:
        """Whether all of it, and this process, are on one machine."""
        return {slot.address for slot in self.slots} == {ray.util.get_node_ip_address()}

    def _options(self, slot: int, *, cpus: float, gpus: float) -> dict[str, Any]:
        bundle = self.slots[slot].bundle
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=bundle)
        return {"num_cpus": cpus, "num_gpus": gpus, "scheduling_strategy": strategy}


def slots_of(plan: Plan) -> int:
    """Return how many slots a plan takes."""
    engine = plan.config.engine
    return num_slots(plan.world_size, engine.num_engines or 1, engine.gpus_per_engine, colocated=plan.colocated)


@contextmanager
def placed(plan: Plan) -> Iterator[Slots]:
    """Reserve the slots of a plan; give all back at the end.

    Raises ConfigError, listing what there is, if the cluster is too small or an engine's GPUs would be of two machines.
    """
    config = plan.config
    gpus = config.cluster.gpus_per_node > 0
    count = slots_of(plan)
    one_machine = config.cluster.nodes == 1
    alive = [node for node in ray.nodes() if node["Alive"]]
    machines = [
        Machine(node["NodeManagerAddress"], node["Resources"].get("CPU", 0.0), node["Resources"].get("GPU", 0.0))
        for node in alive
    ]
    if (lacking := shortage(machines, count, gpus=gpus, one_machine=one_machine)) is not None:
        raise _too_small(f"{lacking}\ntake fewer ranks or engines, or a larger cluster (RAY_ADDRESS)")
    bundle = {"CPU": 1.0, **({"GPU": 1.0} if gpus else {})}
    group = placement_group([bundle] * count, strategy="STRICT_PACK" if one_machine else "PACK")
    try:
        try:
            ray.get(group.ready(), timeout=PLACEMENT_SECONDS)
        except GetTimeoutError:
            has = "\n".join(f"  {machine}" for machine in machines)
            what = f"the Ray cluster has no room for {count} x {bundle} within {PLACEMENT_SECONDS:g} s, of"
            raise _too_small(f"{what}\n{has}\nfree it, or use another (RAY_ADDRESS)") from None
        slots = order_slots(_find(group, count, gpus=gpus, uuids=gpus and not plan.colocated))
        try:
            assignment = assign(
                slots,
                num_ranks=plan.world_size,
                num_engines=config.engine.num_engines or 1,
                gpus_per_engine=config.engine.gpus_per_engine,
                colocated=plan.colocated,
            )
        except ValueError as error:
            raise _too_small(str(error)) from error
        shared = plan.colocated and config.engine.backend == "local"
        yield Slots(group, slots, assignment, (0.5 if shared else 1.0) if gpus else 0.0)
    finally:
        remove_placement_group(group)


def _too_small(message: str) -> ConfigError:
    return ConfigError([Problem("cluster", message)])


def _find(group: Any, count: int, *, gpus: bool, uuids: bool) -> list[Slot]:
    """Return the slot of each bundle."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    devices = [("", "")] * count
    if gpus:
        probe = ray.remote(_gpu_of_this_task)
        asked = [
            probe.options(
                num_cpus=0,
                num_gpus=1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
            ).remote(uuids)
            for index in range(count)
        ]
        devices = ray.get(asked)
    return [Slot(index, addresses[nodes[index]], *devices[index]) for index in range(count)]


def _gpu_of_this_task(uuid: bool) -> tuple[str, str]:
    """Return the task's GPU as CUDA_VISIBLE_DEVICES names it and, if asked for, as `RankInfo.device` does."""
    device = os.environ["CUDA_VISIBLE_DEVICES"]
    if not uuid:
        return device, ""
    import torch  # brings CUDA up in this process, which Ray ends behind a task with a GPU

    return device, f"GPU-{torch.cuda.get_device_properties(0).uuid}"
