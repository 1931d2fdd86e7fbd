"""RLOO: REINFORCE with the mean of a prompt's other responses as the baseline (arXiv 2402.14740)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import milepost
from milepost.components import AdvantageTraits, AlgorithmTraits, Component
from milepost.functional.clip_options import DualClipOptions

if TYPE_CHECKING:
    from milepost_rloo.advantage import LeaveOneOut
    from milepost_rloo.loss import RLOO


class RLOOOptions(DualClipOptions):
    """Options of RLOO; the clip has an effect only with several optimizer steps per rollout."""


def build(options: RLOOOptions) -> RLOO:
    """Build the loss; torch is imported here."""
    from milepost_rloo.loss import RLOO

    return RLOO(options)


def build_advantage(options: milepost.NoOptions) -> LeaveOneOut:
    """Build the estimator; torch is imported here."""
    from milepost_rloo.advantage import LeaveOneOut

    return LeaveOneOut()


@milepost.hookimpl
def milepost_algorithms() -> Iterable[Component[RLOO]]:
    """Provide `rloo`."""
    traits = AlgorithmTraits(advantage="rloo", aggregation="token_mean", group=True)
    return [Component("rloo", RLOOOptions, traits, build, "Policy gradient with a leave-one-out baseline.")]


@milepost.hookimpl
def milepost_advantages() -> Iterable[Component[LeaveOneOut]]:
    """Provide `rloo`."""
    summary = "Reward minus the mean of the group's other samples."
    return [Component("rloo", milepost.NoOptions, AdvantageTraits(group=True), build_advantage, summary)]
