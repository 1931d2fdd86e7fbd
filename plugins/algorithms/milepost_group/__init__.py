"""The group advantage: a reward relative to the others of its prompt (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import milepost
from milepost.components import AdvantageTraits, Component

if TYPE_CHECKING:
    from milepost_group.advantage import GroupAdvantage


class GroupOptions(milepost.Options):
    """Options of the group advantage."""

    normalize_std: bool = True
    """Divide by the standard deviation of the group; false is Dr.GRPO's advantage."""


def build(options: GroupOptions) -> GroupAdvantage:
    """Build the estimator; torch is imported here."""
    from milepost_group.advantage import GroupAdvantage

    return GroupAdvantage(options)


@milepost.hookimpl
def milepost_advantages() -> Iterable[Component[GroupAdvantage]]:
    """Provide `group`."""
    traits = AdvantageTraits(inputs=frozenset({"rewards"}), group=True)
    return [Component("group", GroupOptions, traits, build, "Reward minus the group's mean, over its deviation.")]
