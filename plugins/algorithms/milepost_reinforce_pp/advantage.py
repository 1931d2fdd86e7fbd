"""The advantages of REINFORCE++ (arXiv 2501.03262), with and without a group baseline."""

from __future__ import annotations

from milepost.functional.gae import reinforce_returns
from milepost.functional.kl import kl_divergence
from milepost.functional.reinforce import baseline_advantages
from milepost.functional.whitening import whiten
from milepost.training.inputs import AdvantageBatch, Estimate
from torch import Tensor

from milepost_reinforce_pp import BaselineOptions, PenaltyOptions, ReturnsOptions


class ReinforceReturns:
    """G_t = r_t + gamma G_{t+1} with r_t = -beta kl_t, + R at the last trainable token; whitened."""

    def __init__(self, options: ReturnsOptions) -> None:
        self.options = options

    def estimate(self, batch: AdvantageBatch) -> Estimate:
        """Return the advantages [N]."""
        options = self.options
        returns = reinforce_returns(
            batch.rewards, batch.mask, batch.lengths, gamma=options.gamma, kl=_kl(batch, options), beta=options.beta
        )
        return Estimate(whiten(returns, batch.mask) if options.normalize else returns)


class ReinforceBaseline:
    """(R - group mean) - beta kl_t; whitened."""

    def __init__(self, options: BaselineOptions) -> None:
        self.options = options

    def estimate(self, batch: AdvantageBatch) -> Estimate:
        """Return the advantages [N]."""
        options = self.options
        advantages = baseline_advantages(
            batch.rewards,
            batch.groups,
            batch.rollouts,
            batch.mask,
            batch.lengths,
            kl=_kl(batch, options),
            beta=options.beta,
        )
        return Estimate(whiten(advantages, batch.mask) if options.normalize else advantages)


def _kl(batch: AdvantageBatch, options: PenaltyOptions) -> Tensor | None:
    """KL estimate [N] of each token between the policy that sampled and the reference, if it has a weight."""
    if options.beta == 0.0:
        return None
    return kl_divergence(batch.log_probs, batch.ref_log_probs, options.kl_type)
