"""The Megatron half of the `qwen3` recipe: dense, with norms of q and k."""

from __future__ import annotations

from milepost.weights.dense import DenseMegatron


class Qwen3Megatron(DenseMegatron):
    """Implements `milepost.recipe.MegatronHalf`."""

    def __init__(self) -> None:
        super().__init__("qwen3")
