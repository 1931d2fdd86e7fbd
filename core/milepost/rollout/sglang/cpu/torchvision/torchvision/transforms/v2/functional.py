"""Stands in for `torchvision.transforms.v2.functional`: its names import, and raise when they are used."""

from __future__ import annotations

from milepost.rollout.sglang.cpu.absent import Absent, absent


def __getattr__(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(f"torchvision.transforms.v2.functional.{name}")
