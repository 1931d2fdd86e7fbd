"""Stands in for `torchvision`: its names import, and raise when they are used."""

from __future__ import annotations

from milepost.rollout.sglang.cpu.absent import Absent, absent

__version__ = "0.0.0+milepost"


def __getattr__(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(f"torchvision.{name}")
