"""REINFORCE++: PPO's clip without a critic, advantages whitened over the whole rollout (arXiv 2501.03262)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Literal

import milepost
from milepost.components import AdvantageInput, AdvantageTraits, AlgorithmTraits, Component
from milepost.functional.clip_options import DualClipOptions
from pydantic import Field

if TYPE_CHECKING:
    from milepost_reinforce_pp.advantage import ReinforceBaseline, ReinforceReturns
    from milepost_reinforce_pp.loss import ReinforcePP


class ReinforcePPOptions(DualClipOptions):
    """Options of REINFORCE++."""


class PenaltyOptions(milepost.Options):
    """Options that both estimators of REINFORCE++ have."""

    beta: Annotated[float, Field(ge=0.0)] = 0.01
    """Weight of the KL penalty against the reference at every token; 0 skips the reference."""
    kl_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """KL estimator."""
    normalize: bool = True
    """Whiten advantages over the trainable tokens of the rollout."""


class ReturnsOptions(PenaltyOptions):
    """Options of the estimator `reinforce_pp`."""

    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Discount per trainable token."""


class BaselineOptions(PenaltyOptions):
    """Options of the estimator `reinforce_pp_baseline`."""


def build(options: ReinforcePPOptions) -> ReinforcePP:
    """Build the loss; torch is imported here."""
    from milepost_reinforce_pp.loss import ReinforcePP

    return ReinforcePP(options)


def build_returns(options: ReturnsOptions) -> ReinforceReturns:
    """Build the estimator; torch is imported here."""
    from milepost_reinforce_pp.advantage import ReinforceReturns

    return ReinforceReturns(options)


def build_baseline(options: BaselineOptions) -> ReinforceBaseline:
    """Build the estimator; torch is imported here."""
    from milepost_reinforce_pp.advantage import ReinforceBaseline

    return ReinforceBaseline(options)


def penalty_inputs(options: PenaltyOptions) -> tuple[AdvantageInput, ...]:
    """What the KL penalty reads, if it has a weight."""
    return ("log_probs", "ref_log_probs") if options.beta else ()


@milepost.hookimpl
def milepost_algorithms() -> Iterable[Component[ReinforcePP]]:
    """Provide `reinforce_pp`."""
    traits = AlgorithmTraits(advantage="reinforce_pp", aggregation="token_mean")
    return [
        Component(
            "reinforce_pp",
            ReinforcePPOptions,
            traits,
            build,
            "Clipped policy gradient, advantages whitened over the rollout.",
        )
    ]


@milepost.hookimpl
def milepost_advantages() -> Iterable[Component[ReinforceReturns | ReinforceBaseline]]:
    """Provide `reinforce_pp` and `reinforce_pp_baseline`."""
    returns = AdvantageTraits(more_inputs=penalty_inputs)
    baseline = AdvantageTraits(more_inputs=penalty_inputs, group=True)
    return [
        Component("reinforce_pp", ReturnsOptions, returns, build_returns, "Discounted returns less a KL penalty."),
        Component(
            "reinforce_pp_baseline",
            BaselineOptions,
            baseline,
            build_baseline,
            "Reward minus group mean, less KL.",
        ),
    ]
