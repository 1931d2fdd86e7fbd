"""How much memory a rank's device has in use."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the device that a rank computes on."""

    used: int
    """Bytes in use: of a GPU by all processes, the engine's among them; without GPUs by this rank's process alone."""
    free: int
    """Bytes that can still be taken."""


def read_memory(device: torch.device) -> Memory:
    """Read what is in use right now: what CUDA says of the GPU, or the process's resident set.

    Where the system does not tell the resident set (no /proc), it counts as 0.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total - free, free)
    page = os.sysconf("SC_PAGE_SIZE")
    used = int(_STATM.read_text().split()[1]) * page if _STATM.exists() else 0
    return Memory(used, os.sysconf("SC_AVPHYS_PAGES") * page if _STATM.exists() else 0)


def fullest(readings: Sequence[Memory]) -> float:
    """Return the bytes in use where most are, in gigabytes (10^9)."""
    return max(reading.used for reading in readings) / 1e9
