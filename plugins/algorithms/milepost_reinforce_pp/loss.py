"""The REINFORCE++ policy loss (arXiv 2501.03262)."""

from __future__ import annotations

from milepost.training.clipped import clipped_token_loss
from milepost.training.inputs import PolicyInputs, TokenLoss

from milepost_reinforce_pp import ReinforcePPOptions


class ReinforcePP:
    """Per token max(-rho A, -clip(rho, 1 - eps, 1 + eps_high) A), averaged over all tokens of the step."""

    def __init__(self, options: ReinforcePPOptions) -> None:
        self.options = options

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        """Return the clipped loss of each token, with the metrics of `milepost.training.clipped`."""
        return clipped_token_loss(inputs, self.options)
