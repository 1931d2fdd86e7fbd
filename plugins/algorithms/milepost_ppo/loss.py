"""The PPO policy loss (arXiv 1707.06347). The critic's clipped loss is the kernel's default."""

from __future__ import annotations

from milepost.training.clipped import clipped_token_loss
from milepost.training.inputs import PolicyInputs, TokenLoss

from milepost_ppo import PPOOptions


class PPO:
    """Per token max(-rho A, -clip(rho, 1 - eps, 1 + eps_high) A), rho the token's ratio and A from the critic (GAE)."""

    def __init__(self, options: PPOOptions) -> None:
        self.options = options

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        """Return the clipped loss of each token, with the metrics of `milepost.training.clipped`."""
        return clipped_token_loss(inputs, self.options)
