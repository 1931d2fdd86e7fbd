"""The group advantage, the same for every trainable token of a sample."""

from __future__ import annotations

from milepost.functional.group import group_advantages
from milepost.training.inputs import AdvantageBatch, Estimate

from milepost_group import GroupOptions


class GroupAdvantage:
    """r - mean(group), divided by (std + 1e-6) where std > 0; statistics are over the group's rollouts."""

    def __init__(self, options: GroupOptions) -> None:
        self.normalize_std = options.normalize_std

    def estimate(self, batch: AdvantageBatch) -> Estimate:
        """Return the advantages [N]; zero in a group whose rewards are all equal."""
        per_sample = group_advantages(batch.rewards, batch.groups, batch.rollouts, normalize_std=self.normalize_std)
        return Estimate(batch.spread(per_sample))
