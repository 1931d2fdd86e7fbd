"""Which slots ranks and engines take. A slot is one GPU of a node (or, without GPUs, a share of its CPUs).

Slots are ordered by node and, within one, by GPU; ranks take the first ones, so neighbouring ranks are near each other.
Colocated engines stand on the ranks' slots, others on the slots behind them. An engine of several GPUs takes that many
neighbours, all of one node. Nothing here knows Ray.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Slot:
    """One GPU, or a share of a node's CPUs."""

    bundle: int
    """Its number in Ray's placement group."""
    address: str
    """Of its node, on the private network."""
    device: str = ""
    """The GPU as CUDA_VISIBLE_DEVICES names it: a number or a UUID; empty without GPUs."""
    uuid: str = ""
    """The GPU as `RankInfo.device` names it; empty if nobody had to know."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """Slots by their positions in the order."""

    ranks: tuple[int, ...]
    """Slot of each rank."""
    engines: tuple[tuple[int, ...], ...]
    """Slots of each engine."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What one node of a cluster has, whoever uses it at the moment."""

    address: str
    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.address}: {self.cpus:g} CPUs, {self.gpus:g} GPUs"


def num_slots(num_ranks: int, num_engines: int, gpus_per_engine: int, *, colocated: bool) -> int:
    """Return how many slots a run takes."""
    return num_ranks + (0 if colocated else num_engines * gpus_per_engine)


def order_slots(slots: Iterable[Slot]) -> list[Slot]:
    """Return slots by node, then by GPU (numbers as numbers), then by bundle."""

    def key(slot: Slot) -> tuple[Any, ...]:
        try:
            node: tuple[Any, ...] = (0, ipaddress.ip_address(slot.address).packed)
        except ValueError:
            node = (1, slot.address)
        device = (0, int(slot.device), "") if slot.device.isdigit() else (1, 0, slot.device)
        return (*node, *device, slot.bundle)

    return sorted(slots, key=key)


def assign(
    slots: Sequence[Slot], *, num_ranks: int, num_engines: int, gpus_per_engine: int, colocated: bool
) -> Assignment:
    """Give ranks and engines their slots; `slots` are in order, `num_slots` of them.

    More colocated engines than there are slots, as CPUs allow, begin again at the first.

    Raises ValueError, saying which, if an engine would lie on two nodes.
    """
    engines = []
    for index in range(num_engines):
        first = index * gpus_per_engine
        wanted = range(first, first + gpus_per_engine)
        taken = tuple(slot % num_ranks if colocated else num_ranks + slot for slot in wanted)
        nodes = list(dict.fromkeys(slots[slot].address for slot in taken))
        if len(nodes) > 1:
            raise ValueError(
                f"engine {index} of {gpus_per_engine} GPUs would lie on {' and '.join(nodes)}, but an engine's GPUs "
                "are of one machine: the cluster's free GPUs are not spread evenly over its machines"
            )
        engines.append(taken)
    return Assignment(tuple(range(num_ranks)), tuple(engines))


def shortage(machines: Sequence[Machine], count: int, *, gpus: bool, one_machine: bool) -> str | None:
    """Say what a cluster lacks for so many slots, and what it has; None if it is large enough."""
    what = f"{count} CPUs" + (f" and {count} GPUs" if gpus else "")

    def fits(cpus: float, devices: float) -> bool:
        return cpus >= count and (devices >= count or not gpus)

    if one_machine:
        enough = any(fits(machine.cpus, machine.gpus) for machine in machines)
    else:
        enough = fits(sum(machine.cpus for machine in machines), sum(machine.gpus for machine in machines))
    if enough:
        return None
    where = " on one machine (cluster.nodes: 1)" if one_machine else ""
    has = "\n".join(f"  {machine}" for machine in machines)
    return f"the plan needs {what}{where}, the Ray cluster has\n{has}"
