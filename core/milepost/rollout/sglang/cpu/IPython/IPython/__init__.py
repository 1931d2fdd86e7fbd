"""Stands in for `IPython`: its names import, and raise when they are used."""  # noqa: N999

from __future__ import annotations

from milepost.rollout.sglang.cpu.absent import Absent, absent


def get_ipython() -> None:
    """Say that there is no notebook, as IPython does outside of one; wandb asks, and Megatron-core imports wandb."""
    return


def __getattr__(name: str) -> Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return absent(f"IPython.{name}")
