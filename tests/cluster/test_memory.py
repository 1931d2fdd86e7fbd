"""What is measured behind each phase, on a CPU."""

from __future__ import annotations

import torch
from milepost.cluster.memory import Memory, fullest, read_memory


def test_a_process_that_takes_memory_has_more_of_it() -> None:
    before = read_memory(torch.device("cpu"))
    taken = torch.ones(64 * 2**20)  # 256 MiB, all of it written
    behind = read_memory(torch.device("cpu"))
    assert taken.sum() == 64 * 2**20
    assert 0.9 * 2**28 < behind.used - before.used < 1.5 * 2**28
    assert behind.free > 0


def test_the_fullest_device_counts() -> None:
    assert fullest([Memory(3_000_000_000, 1), Memory(5_500_000_000, 0), Memory(1, 7)]) == 5.5
