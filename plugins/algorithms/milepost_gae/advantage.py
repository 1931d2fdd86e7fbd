"""Generalised advantage estimation (arXiv 1506.02438)."""

from __future__ import annotations

from milepost.functional.gae import gae
from milepost.functional.whitening import whiten
from milepost.training.inputs import AdvantageBatch, Estimate

from milepost_gae import GAEOptions


class GAE:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, over the trainable tokens alone."""

    def __init__(self, options: GAEOptions) -> None:
        self.options = options

    def estimate(self, batch: AdvantageBatch) -> Estimate:
        """Return advantages [N], whitened if asked, and returns [N], which are A + V before whitening."""
        advantages, returns = gae(
            batch.rewards,
            batch.values,
            batch.mask,
            batch.lengths,
            gamma=self.options.gamma,
            lam=self.options.lam,
            token_rewards=batch.token_rewards,
        )
        return Estimate(whiten(advantages, batch.mask) if self.options.normalize else advantages, returns)
