"""The local engine: generation in this process."""

from milepost.rollout.local.engine import LocalEngine

__all__ = ["LocalEngine"]
