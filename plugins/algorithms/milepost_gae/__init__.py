"""Generalised advantage estimation, from a critic's values (arXiv 1506.02438)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import milepost
from milepost.components import AdvantageTraits, Component
from pydantic import Field

if TYPE_CHECKING:
    from milepost.config.plan import Plan

    from milepost_gae.advantage import GAE


class GAEOptions(milepost.Options):
    """Options of generalised advantage estimation."""

    gamma: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Discount per trainable token."""
    lam: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """Lambda: 1 compares values with what came of the sample, less trusts the critic's later values more."""
    normalize: bool = True
    """Whiten advantages over the trainable tokens of the rollout."""
    kl_coef: float = 0.0
    """Weight of a KL penalty inside token rewards; refused unless 0, because the critic trains before it exists."""


def build(options: GAEOptions) -> GAE:
    """Build the estimator; torch is imported here."""
    from milepost_gae.advantage import GAE

    return GAE(options)


def check(plan: Plan, options: GAEOptions) -> Iterator[str]:
    """Refuse a reward-level KL penalty."""
    if options.kl_coef:
        yield (
            f"kl_coef {options.kl_coef:g} asks for a KL penalty inside the rewards, but the critic trains on those "
            "before the reference's log-probs exist; leave it 0 and use algorithm.kl_loss_coef"
        )


@milepost.hookimpl
def milepost_advantages() -> Iterable[Component[GAE]]:
    """Provide `gae`."""
    traits = AdvantageTraits(frozenset({"rewards", "token_rewards", "values"}), returns=True, check=check)
    return [Component("gae", GAEOptions, traits, build, "Generalised advantage estimation from a critic's values.")]
