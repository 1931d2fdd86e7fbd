"""The reward itself as the advantage: REINFORCE without a baseline, or nothing to learn from a reward at all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import milepost
from milepost.components import AdvantageTraits, Component

if TYPE_CHECKING:
    from milepost_raw.advantage import RawReward


def build(options: milepost.NoOptions) -> RawReward:
    """Build the estimator; torch is imported here."""
    from milepost_raw.advantage import RawReward

    return RawReward()


@milepost.hookimpl
def milepost_advantages() -> Iterable[Component[RawReward]]:
    """Provide `raw`."""
    return [Component("raw", milepost.NoOptions, AdvantageTraits(), build, "The reward itself, without a baseline.")]
