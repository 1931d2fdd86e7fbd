"""The DAPO loss (arXiv 2503.14476, equation 8): a wider upper clip, averaged over all tokens of the step."""

from __future__ import annotations

from milepost.training.clipped import clipped_token_loss
from milepost.training.inputs import PolicyInputs, TokenLoss

from milepost_dapo import DAPOOptions


class DAPO:
    """Per token max(-rho A, -clip(rho, 1 - eps, 1 + eps_high) A) with eps_high > eps."""

    def __init__(self, options: DAPOOptions) -> None:
        self.options = options

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        """Return the clipped loss of each token, with the metrics of `milepost.training.clipped`."""
        return clipped_token_loss(inputs, self.options)
