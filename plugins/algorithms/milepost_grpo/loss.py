"""The GRPO loss (arXiv 2402.03300), which is PPO's clipped objective without a critic."""

from __future__ import annotations

from milepost.training.clipped import clipped_token_loss
from milepost.training.inputs import PolicyInputs, TokenLoss

from milepost_grpo import GRPOOptions


class GRPO:
    """Per token max(-rho A, -clip(rho, 1 - eps, 1 + eps_high) A), rho the token's probability ratio."""

    def __init__(self, options: GRPOOptions) -> None:
        self.options = options

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        """Return the clipped loss of each token, with the metrics of `milepost.training.clipped`."""
        return clipped_token_loss(inputs, self.options)
