"""The GRPO loss (arXiv 2402.03300), which is PPO's clipped objective without a critic."""

from __future__ import annotations

from milepost.functional.clipping import clipped_policy_loss
from milepost.functional.ratios import log_prob_difference, ratio
from milepost.training.inputs import Metric, PolicyInputs, TokenLoss

from milepost_grpo import GRPOOptions


class GRPO:
    """Per token max(-rho A, -clip(rho, 1 - eps, 1 + eps_high) A), rho the token's probability ratio."""

    def __init__(self, options: GRPOOptions) -> None:
        self.eps_clip = options.eps_clip
        self.eps_clip_high = options.eps_clip if options.eps_clip_high is None else options.eps_clip_high
        self.dual_clip = options.dual_clip

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        """Return the clipped loss of each token.

        Metrics: `pg_clipfrac`, share of tokens that were clipped; `ppo_kl`, mean of log-prob(old) - log-prob(new);
        `ratio_max` and `ratio_min`; with a dual clip `pg_dual_clipfrac`.
        """
        difference = log_prob_difference(inputs.old_log_probs, inputs.log_probs)
        rho = ratio(difference)
        loss = clipped_policy_loss(rho, inputs.advantages, self.eps_clip, self.eps_clip_high, self.dual_clip)
        metrics = {
            "pg_clipfrac": Metric(loss.clipped.float()),
            "ppo_kl": Metric(difference.detach()),
            "ratio_max": Metric(rho.detach(), "max"),
            "ratio_min": Metric(rho.detach(), "min"),
        }
        if self.dual_clip is not None:
            metrics["pg_dual_clipfrac"] = Metric(loss.dual_clipped.float())
        return TokenLoss(loss.values, metrics)
