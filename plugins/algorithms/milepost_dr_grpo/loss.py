"""The Dr.GRPO loss (arXiv 2503.20783): GRPO's, under another advantage and aggregation."""

from __future__ import annotations

from milepost.training.clipped import clipped_token_loss
from milepost.training.inputs import PolicyInputs, TokenLoss

from milepost_dr_grpo import DrGRPOOptions


class DrGRPO:
    """Per token max(-rho A, -clip(rho, 1 - eps, 1 + eps_high) A), with A = r - mean(group).

    The aggregation `constant` divides the sum over tokens by samples x length, which the kernel does.
    """

    def __init__(self, options: DrGRPOOptions) -> None:
        self.options = options

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        """Return the clipped loss of each token, with the metrics of `milepost.training.clipped`."""
        return clipped_token_loss(inputs, self.options)
