"""The CISPO loss (arXiv 2506.13585)."""

from __future__ import annotations

from milepost.functional.clipping import cispo_loss
from milepost.functional.ratios import log_prob_difference, ratio
from milepost.training.clipped import ratio_metrics
from milepost.training.inputs import Metric, PolicyInputs, TokenLoss

from milepost_cispo import CISPOOptions


class CISPO:
    """Per token -stop_gradient(clip(rho, 1 - eps, 1 + eps_high)) A logp."""

    def __init__(self, options: CISPOOptions) -> None:
        self.low, self.high = options.eps_clip, options.high

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        """Return the loss of each token; `pg_clipfrac` is the share of tokens whose ratio was out of bounds."""
        difference = log_prob_difference(inputs.old_log_probs, inputs.log_probs)
        rho = ratio(difference)
        outside = (rho < 1.0 - self.low) | (rho > 1.0 + self.high)
        metrics = ratio_metrics(difference, rho) | {"pg_clipfrac": Metric(outside.float())}
        return TokenLoss(cispo_loss(rho, inputs.advantages, inputs.log_probs, self.low, self.high), metrics)
