"""Hook module that the config tests lay beside their run configs: one of everything, none of it can be built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NoReturn

import milepost
from milepost.components import (
    AdvantageTraits,
    AlgorithmTraits,
    Component,
    ModelLayout,
    ModelTraits,
    RewardTraits,
    TransportTraits,
)
from pydantic import Field


class ClipOptions(milepost.Options):
    eps_clip: float = Field(0.2, gt=0)
    """How far the ratio may move."""
    mode: Literal["hard", "soft"] = "hard"
    """How it is held there."""


class GroupOptions(milepost.Options):
    normalize_std: bool = True
    """Divide by the standard deviation."""


class GaeOptions(milepost.Options):
    gamma: float = 1.0
    """Discount."""
    lam: float = 1.0
    """Trace decay."""


class FunctionOptions(milepost.Options):
    function: str
    """`module:name`."""


def never(options: Any) -> NoReturn:
    raise AssertionError("planning builds nothing")


def check_clip(plan: Any, options: ClipOptions) -> Iterator[str]:
    if options.eps_clip >= plan.steps_per_rollout:
        yield f"eps_clip {options.eps_clip} must be below steps_per_rollout {plan.steps_per_rollout}"


def broken_check(plan: Any, options: Any) -> Iterator[str]:
    raise RuntimeError("the check itself is broken")


def layout(config: Mapping[str, Any]) -> ModelLayout:
    if config["hidden_size"] % 2:
        raise ValueError(f"hidden_size {config['hidden_size']} is odd")
    return ModelLayout(
        num_layers=2,
        hidden_size=config["hidden_size"],
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=100,
        num_parameters=1_000_000,
        tied_embeddings=True,
        max_positions=2048,
    )


@milepost.hookimpl
def milepost_algorithms() -> Iterable[Any]:
    clip = AlgorithmTraits(advantage="toy_group", group=True, check=check_clip)
    critic = AlgorithmTraits(advantage="toy_gae", advantage_options={"lam": 0.9}, aggregation="token_mean", critic=True)
    return [
        Component("toy", ClipOptions, clip, never, "Clips."),
        Component("toy_critic", ClipOptions, critic, never, "Has a critic."),
        Component("toy_student", milepost.NoOptions, AlgorithmTraits("toy_group", teacher=True), never, "Learns."),
        Component("toy_broken", milepost.NoOptions, AlgorithmTraits("toy_raw", check=broken_check), never, "Breaks."),
    ]


@milepost.hookimpl
def milepost_advantages() -> Iterable[Any]:
    gae = AdvantageTraits(frozenset({"rewards", "values"}), returns=True)
    kl = AdvantageTraits(frozenset({"rewards", "ref_log_probs"}), returns=True)
    return [
        Component("toy_group", GroupOptions, AdvantageTraits(group=True), never, "Of a group."),
        Component("toy_gae", GaeOptions, gae, never, "Of a critic."),
        Component("toy_kl", milepost.NoOptions, kl, never, "With a KL term."),
        Component("toy_raw", milepost.NoOptions, AdvantageTraits(), never, "The reward itself."),
    ]


@milepost.hookimpl
def milepost_rewards() -> Iterable[Any]:
    return [
        Component("toy_match", milepost.NoOptions, RewardTraits(), never, "Compares with the label."),
        Component("toy_free", milepost.NoOptions, RewardTraits(needs_label=False), never, "Needs no label."),
        Component("toy_function", FunctionOptions, RewardTraits(), never, "Calls a function."),
    ]


@milepost.hookimpl
def milepost_models() -> Iterable[Any]:
    traits = ModelTraits(("ToyForCausalLM",), layout, lambda sizes, length: 6.0 * sizes.num_parameters * length)
    full = ModelTraits(("FullForCausalLM",), layout, traits.train_flops, megatron=True)
    return [
        Component("toy_model", milepost.NoOptions, traits, never, "A model."),
        Component("toy_full", milepost.NoOptions, full, never, "A model with a Megatron half."),
    ]


@milepost.hookimpl
def milepost_transports() -> Iterable[Any]:
    return [
        Component("toy_near", milepost.NoOptions, TransportTraits("required"), never, "Colocated."),
        Component("toy_far", milepost.NoOptions, TransportTraits("forbidden"), never, "Not colocated."),
        Component("toy_any", milepost.NoOptions, TransportTraits(), never, "Either."),
    ]
