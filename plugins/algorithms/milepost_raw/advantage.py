"""The reward itself, the same for every trainable token of a sample."""

from __future__ import annotations

from milepost.training.inputs import AdvantageBatch, Estimate


class RawReward:
    """A = R."""

    def estimate(self, batch: AdvantageBatch) -> Estimate:
        """Return the advantages [N]."""
        return Estimate(batch.spread(batch.rewards))
