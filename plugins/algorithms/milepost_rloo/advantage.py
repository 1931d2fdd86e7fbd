"""The leave-one-out advantage (arXiv 2402.14740), the same for every trainable token of a sample."""

from __future__ import annotations

from milepost.functional.group import leave_one_out_advantages
from milepost.training.inputs import AdvantageBatch, Estimate


class LeaveOneOut:
    """r - mean of the other rollouts of the group."""

    def estimate(self, batch: AdvantageBatch) -> Estimate:
        """Return the advantages [N]; zero in a group whose rewards are all equal."""
        return Estimate(batch.spread(leave_one_out_advantages(batch.rewards, batch.groups, batch.rollouts)))
