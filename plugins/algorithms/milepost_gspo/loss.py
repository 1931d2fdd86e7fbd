"""The GSPO loss (arXiv 2507.18071)."""

from __future__ import annotations

from milepost.functional.ratios import log_prob_difference, sequence_difference
from milepost.training.clipped import clipped_token_loss
from milepost.training.inputs import PolicyInputs, TokenLoss

from milepost_gspo import GSPOOptions


class GSPO:
    """rho_seq = exp(-mean of d over the sequence), the same for all its tokens, clipped as a whole."""

    def __init__(self, options: GSPOOptions) -> None:
        self.options = options

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        """Return the clipped loss of each token; the ratios in the metrics are those of sequences."""
        own = log_prob_difference(inputs.old_log_probs, inputs.log_probs)
        return clipped_token_loss(inputs, self.options, sequence_difference(own, inputs.sample_mean))
