"""The Megatron half of the `llama` recipe."""

from __future__ import annotations

from milepost.weights.dense import DenseMegatron


class LlamaMegatron(DenseMegatron):
    """Implements `milepost.recipe.MegatronHalf`."""

    def __init__(self) -> None:
        super().__init__("llama")
