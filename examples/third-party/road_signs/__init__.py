"""Hooks, options and traits; every milepost command imports this module, so nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import milepost
from milepost.components import (
    AdvantageComponent,
    AdvantageTraits,
    AlgorithmComponent,
    AlgorithmTraits,
    RewardComponent,
    RewardTraits,
)
from pydantic import Field

if TYPE_CHECKING:
    from road_signs.closeness import Closeness
    from road_signs.rank import Rank
    from road_signs.sapo import SAPO


class ClosenessOptions(milepost.Options):
    """Options of `closeness`."""

    scale: Annotated[float, Field(gt=0.0)] = 10.0
    """Distance from the label at which the score is a half."""


class SAPOOptions(milepost.Options):
    """Options of `sapo`."""

    tau_positive: Annotated[float, Field(gt=0.0)] = 1.0
    """Temperature of the gate where the advantage is positive."""
    tau_negative: Annotated[float, Field(gt=0.0)] = 1.05
    """The same elsewhere; higher narrows the gate, since pushing a token down moves all others."""


def build_closeness(options: ClosenessOptions) -> Closeness:
    """Build the reward."""
    from road_signs.closeness import Closeness

    return Closeness(options.scale)


def build_sapo(options: SAPOOptions) -> SAPO:
    """Build the loss; torch is imported here."""
    from road_signs.sapo import SAPO

    return SAPO(options)


def build_rank(options: milepost.NoOptions) -> Rank:
    """Build the estimator; torch is imported here."""
    from road_signs.rank import Rank

    return Rank()


@milepost.hookimpl
def milepost_rewards() -> Iterable[RewardComponent]:
    """Provide `closeness`."""
    summary = "How near the last number of a response is to the label."
    return [milepost.Component("closeness", ClosenessOptions, RewardTraits(), build_closeness, summary)]


@milepost.hookimpl
def milepost_algorithms() -> Iterable[AlgorithmComponent]:
    """Provide `sapo`."""
    traits = AlgorithmTraits(advantage="group", aggregation="sample_mean", group=True)
    summary = "Policy gradient through a smooth gate of the probability ratio (SAPO)."
    return [milepost.Component("sapo", SAPOOptions, traits, build_sapo, summary)]


@milepost.hookimpl
def milepost_advantages() -> Iterable[AdvantageComponent]:
    """Provide `rank`."""
    traits = AdvantageTraits(inputs=frozenset({"rewards"}), group=True)
    summary = "A response's rank among those of its prompt, from -1 to 1."
    return [milepost.Component("rank", milepost.NoOptions, traits, build_rank, summary)]
