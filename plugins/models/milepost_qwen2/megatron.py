"""The Megatron half of the `qwen2` recipe: dense, with biases of q, k and v."""

from __future__ import annotations

from milepost.weights.dense import DenseMegatron


class Qwen2Megatron(DenseMegatron):
    """Implements `milepost.recipe.MegatronHalf`."""

    def __init__(self) -> None:
        super().__init__("qwen2")
