"""Soft Adaptive Policy Optimization (Gao et al., arXiv 2511.20347)."""

from __future__ import annotations

import torch
from milepost.functional.ratios import log_prob_difference, ratio
from milepost.training.clipped import ratio_metrics
from milepost.training.inputs import Metric, PolicyInputs, TokenLoss

from road_signs import SAPOOptions


class SAPO:
    """-f(rho) A at each token, f(rho) = 4 / tau sigmoid(tau (rho - 1)), tau by the sign of the advantage.

    Where a clip cuts the gradient off at once, the gate lets it fade: f'(rho) is 1 on policy and
    4 p (1 - p) elsewhere, p = sigmoid(tau (rho - 1)).
    """

    def __init__(self, options: SAPOOptions) -> None:
        self.options = options

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        """Return the loss of each token [N], with `gate`, the mean of f'(rho): 1 where nothing is held back."""
        difference = log_prob_difference(inputs.old_log_probs, inputs.log_probs)
        rho = ratio(difference)
        positive, negative = (rho.new_tensor(t) for t in (self.options.tau_positive, self.options.tau_negative))
        tau = torch.where(inputs.advantages > 0, positive, negative)
        p = torch.sigmoid(tau * (rho - 1))
        gate = (4 * p * (1 - p)).detach()
        return TokenLoss(-4 / tau * p * inputs.advantages, ratio_metrics(difference, rho) | {"gate": Metric(gate)})
