"""What planning knows of a Qwen3 mixture of experts, read from its `config.json` in plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from milepost.components import ModelLayout
from milepost.weights.layouts import dense_layout, dense_train_flops, integer


def num_experts(config: Mapping[str, Any]) -> int:
    """Return the experts of each layer. Raises ValueError if there are none, or the two names for them disagree."""
    names = [name for name in ("num_experts", "num_local_experts") if config.get(name) is not None]
    counts = {integer(config, name) for name in names or ["num_experts"]}
    if len(counts) > 1:
        raise ValueError(
            f"config.json has num_experts = {config['num_experts']} and num_local_experts = "
            f"{config['num_local_experts']}, expected one number"
        )
    return counts.pop()


def experts_per_token(config: Mapping[str, Any]) -> int:
    """Return the experts that a token visits. Raises ValueError if there are not as many."""
    visited, experts = integer(config, "num_experts_per_tok"), num_experts(config)
    if visited > experts:
        raise ValueError(f"config.json has num_experts_per_tok = {visited}, but only {experts} experts")
    return visited


def check_sparse(config: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the key, if some layers have a dense feed-forward in place of experts."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if step != 1:
        raise ValueError(f"config.json has decoder_sparse_step = {step!r}, expected 1: experts in every layer")
    if dense:
        raise ValueError(f"config.json has mlp_only_layers = {dense!r}, expected none: experts in every layer")


def moe_layout(config: Mapping[str, Any]) -> ModelLayout:
    """Return the numbers of a Qwen3 mixture; the parameter count is exact.

    Raises ValueError naming a value that is missing, malformed or not understood.
    """
    check_sparse(config)
    inner, experts = integer(config, "moe_intermediate_size"), num_experts(config)
    one = dense_layout({**config, "num_experts": None, "num_local_experts": None, "intermediate_size": inner})
    expert = 3 * one.hidden_size * inner
    router = experts * one.hidden_size
    return replace(
        one,
        num_parameters=one.num_parameters + one.num_layers * ((experts - 1) * expert + router),
        num_experts=experts,
        feed_forward=experts_per_token(config) * inner,
        expert_parameters=one.num_layers * experts * expert,
    )


def moe_train_flops(layout: ModelLayout, length: int) -> float:
    """Return the operations of forward and backward over one sequence of `length` tokens: of the experts it visits."""
    active = layout.num_layers * 3 * layout.hidden_size * layout.feed_forward
    visited = replace(layout, num_parameters=layout.num_parameters - layout.expert_parameters + active)
    return dense_train_flops(visited, length)
