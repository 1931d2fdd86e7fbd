"""The clipped policy objective with its metrics: what PPO, GRPO and their relatives have in common."""

from __future__ import annotations

from torch import Tensor

from milepost.functional.clip_options import ClipOptions, DualClipOptions
from milepost.functional.clipping import clipped_policy_loss
from milepost.functional.ratios import log_prob_difference, ratio
from milepost.training.inputs import Metric, PolicyInputs, TokenLoss


def clipped_token_loss(inputs: PolicyInputs, options: ClipOptions, difference: Tensor | None = None) -> TokenLoss:
    """max(-rho A, -clip(rho, 1 - eps, 1 + eps_high) A) at each token, dual-clipped where the options say so.

    Args:
        inputs: of the algorithm.
        options: eps_clip, eps_clip_high and, of `DualClipOptions`, dual_clip.
        difference: [N], the log-prob(old) - log-prob(new) that rho is of; default each token's own.

    Returns:
        Losses [N] and the metrics of `ratio_metrics`, with `pg_clipfrac`, the share of tokens that were clipped, and
        under a dual clip `pg_dual_clipfrac`.
    """
    own = log_prob_difference(inputs.old_log_probs, inputs.log_probs)
    rho = ratio(own if difference is None else difference)
    dual_clip = options.dual_clip if isinstance(options, DualClipOptions) else None
    loss = clipped_policy_loss(rho, inputs.advantages, options.eps_clip, options.high, dual_clip)
    metrics = ratio_metrics(own, rho) | {"pg_clipfrac": Metric(loss.clipped.float())}
    if dual_clip is not None:
        metrics["pg_dual_clipfrac"] = Metric(loss.dual_clipped.float())
    return TokenLoss(loss.values, metrics)


def ratio_metrics(difference: Tensor, rho: Tensor) -> dict[str, Metric]:
    """How far the policy moved: `ppo_kl`, the mean of log-prob(old) - log-prob(new), `ratio_max` and `ratio_min`.

    Args:
        difference: [N], d of every token.
        rho: [N], the ratio that the objective uses.
    """
    return {
        "ppo_kl": Metric(difference.detach()),
        "ratio_max": Metric(rho.detach(), "max"),
        "ratio_min": Metric(rho.detach(), "min"),
    }
