"""The RLOO policy loss (arXiv 2402.14740)."""

from __future__ import annotations

from milepost.training.clipped import clipped_token_loss
from milepost.training.inputs import PolicyInputs, TokenLoss

from milepost_rloo import RLOOOptions


class RLOO:
    """Per token max(-rho A, -clip(rho, 1 - eps, 1 + eps_high) A), whose gradient on policy is that of -A logp.

    A response's log-prob is the sum of its tokens', so every token weighs the same (aggregation `token_mean`). The
    ratio and its clip come in where a rollout is used for several steps, which the paper does not do.
    """

    def __init__(self, options: RLOOOptions) -> None:
        self.options = options

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        """Return the clipped loss of each token, with the metrics of `milepost.training.clipped`."""
        return clipped_token_loss(inputs, self.options)
