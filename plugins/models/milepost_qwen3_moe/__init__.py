"""The model recipe `qwen3_moe`: Qwen3 with a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import milepost
from milepost.components import ModelComponent, ModelTraits

from milepost_qwen3_moe.layout import moe_layout, moe_train_flops

if TYPE_CHECKING:
    from milepost.recipe import Recipe


def build(options: milepost.NoOptions) -> Recipe:
    """Build the recipe."""
    from milepost_qwen3_moe.recipe import Qwen3MoeRecipe

    return Qwen3MoeRecipe()


@milepost.hookimpl
def milepost_models() -> Iterable[ModelComponent]:
    """Provide the recipe."""
    traits = ModelTraits(("Qwen3MoeForCausalLM",), moe_layout, moe_train_flops, megatron=True)
    summary = "Qwen3 models with experts in every layer; expert parallelism on Megatron."
    return [milepost.Component("qwen3_moe", milepost.NoOptions, traits, build, summary)]
