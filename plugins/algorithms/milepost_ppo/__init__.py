"""PPO: the clipped policy objective with a learned critic (arXiv 1707.06347)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import milepost
from milepost.components import AlgorithmTraits, Component
from milepost.functional.clip_options import DualClipOptions

if TYPE_CHECKING:
    from milepost_ppo.loss import PPO


class PPOOptions(DualClipOptions):
    """Options of PPO; the critic's are in section `critic`."""


def build(options: PPOOptions) -> PPO:
    """Build the loss; torch is imported here."""
    from milepost_ppo.loss import PPO

    return PPO(options)


@milepost.hookimpl
def milepost_algorithms() -> Iterable[Component[PPO]]:
    """Provide `ppo`."""
    traits = AlgorithmTraits(advantage="gae", aggregation="sample_mean", critic=True)
    return [Component("ppo", PPOOptions, traits, build, "Clipped policy gradient, advantages from a learned critic.")]
