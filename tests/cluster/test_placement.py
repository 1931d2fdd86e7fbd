"""Which slots ranks and engines take, worked by hand."""

from __future__ import annotations

import pytest
from milepost.cluster.placement import Machine, Slot, assign, num_slots, order_slots, shortage


def machines(*sizes: int) -> list[Slot]:
    """Slots of machines with so many GPUs each, in order."""
    slots = []
    for node, size in enumerate(sizes):
        slots += [Slot(len(slots) + gpu, f"10.0.0.{node + 1}", str(gpu)) for gpu in range(size)]
    return slots


def test_slots_are_ordered_by_node_and_gpu_whatever_ray_called_the_bundles() -> None:
    given = [
        Slot(0, "10.0.0.10", "1"),
        Slot(1, "10.0.0.9", "10"),
        Slot(2, "10.0.0.9", "2"),
        Slot(3, "10.0.0.10", "0"),
        Slot(4, "10.0.0.9", "GPU-b"),
        Slot(5, "10.0.0.9", "GPU-a"),
    ]
    # numbers as numbers: node 9 before node 10, GPU 2 before GPU 10
    assert [slot.bundle for slot in order_slots(given)] == [2, 1, 5, 4, 3, 0]
    on_cpus = [Slot(1, "10.0.0.1"), Slot(0, "10.0.0.1")]
    assert [slot.bundle for slot in order_slots(on_cpus)] == [0, 1]


def test_four_engines_of_two_share_eight_gpus_with_eight_ranks() -> None:
    assert num_slots(8, 4, 2, colocated=True) == 8
    found = assign(machines(8), num_ranks=8, num_engines=4, gpus_per_engine=2, colocated=True)
    assert found.ranks == (0, 1, 2, 3, 4, 5, 6, 7)
    assert found.engines == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_two_engines_of_eight_on_two_machines() -> None:
    found = assign(machines(8, 8), num_ranks=16, num_engines=2, gpus_per_engine=8, colocated=True)
    assert found.engines == (tuple(range(8)), tuple(range(8, 16)))


def test_engines_of_their_own_stand_behind_the_ranks() -> None:
    # 8 GPUs: four ranks, two engines of two
    assert num_slots(4, 2, 2, colocated=False) == 8
    found = assign(machines(8), num_ranks=4, num_engines=2, gpus_per_engine=2, colocated=False)
    assert (found.ranks, found.engines) == ((0, 1, 2, 3), ((4, 5), (6, 7)))
    # 2 x 8: twelve ranks reach into the second machine, the engine of four is its other half
    found = assign(machines(8, 8), num_ranks=12, num_engines=1, gpus_per_engine=4, colocated=False)
    assert (found.ranks, found.engines) == (tuple(range(12)), ((12, 13, 14, 15),))


def test_an_engine_on_two_machines_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"engine 1 of 2 GPUs would lie on 10\.0\.0\.1 and 10\.0\.0\.2"):
        assign(machines(3, 5), num_ranks=8, num_engines=4, gpus_per_engine=2, colocated=True)


def test_more_engines_than_cpu_slots_begin_again() -> None:
    cpus = [Slot(0, "10.0.0.1"), Slot(1, "10.0.0.1")]
    found = assign(cpus, num_ranks=2, num_engines=3, gpus_per_engine=1, colocated=True)
    assert found.engines == ((0,), (1,), (0,))


def test_what_a_cluster_lacks_is_said_with_what_it_has() -> None:
    small = [Machine("10.0.0.1", 16, 4), Machine("10.0.0.2", 8, 4)]
    assert shortage(small, 8, gpus=True, one_machine=False) is None
    assert shortage(small, 4, gpus=True, one_machine=True) is None
    assert shortage(small, 16, gpus=False, one_machine=True) is None
    assert shortage(small, 8, gpus=True, one_machine=True) == (
        "the plan needs 8 CPUs and 8 GPUs on one machine (cluster.nodes: 1), the Ray cluster has\n"
        "  10.0.0.1: 16 CPUs, 4 GPUs\n  10.0.0.2: 8 CPUs, 4 GPUs"
    )
    lacking = shortage(small, 25, gpus=False, one_machine=False)
    assert lacking is not None and lacking.startswith("the plan needs 25 CPUs, the Ray cluster has\n")
