"""Probability ratios between the policy that is trained and the one that sampled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from milepost.functional.checks import check_flat

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to this on either side: exp(20) is about 5e8, far beyond any clip range, and finite."""


def log_prob_difference(old_log_probs: Tensor, log_probs: Tensor) -> Tensor:
    """d = log-prob(old) - log-prob(new), where a non-finite difference counts as 0.

    Args:
        old_log_probs: [N] under the policy that sampled.
        log_probs: [N] under the policy that is trained; differentiable.

    Returns:
        [N]; no gradient flows where the difference was not finite.
    """
    check_flat(old_log_probs=old_log_probs, log_probs=log_probs)
    return finite_or_zero(old_log_probs - log_probs)


def finite_or_zero(x: Tensor) -> Tensor:
    """Replace what is not finite by 0, without a gradient there."""
    return torch.where(torch.isfinite(x), x, x.new_zeros(()))


def ratio(difference: Tensor) -> Tensor:
    """rho = exp(clamp(-d, -20, 20)); a non-finite d counts as 0, so rho is 1 there.

    Args:
        difference: [N], d of `log_prob_difference` or of `sequence_difference`.

    Returns:
        [N], positive and finite.
    """
    return torch.exp((-finite_or_zero(difference)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def sequence_difference(difference: Tensor, sample_mean: Callable[[Tensor], Tensor]) -> Tensor:
    """d_seq = sum(m d) / sum(m) over each sample, the same for all its tokens (GSPO, arXiv 2507.18071).

    Args:
        difference: [N], d of every token.
        sample_mean: `PolicyInputs.sample_mean`, the masked mean over each whole sample, spread back to its tokens.

    Returns:
        [N]; its `ratio` is the geometric mean of the token ratios of the sample.
    """
    return sample_mean(finite_or_zero(difference))


def importance_factor(trainer_log_probs: Tensor, engine_log_probs: Tensor) -> Tensor:
    """exp(logp_trainer - logp_engine), detached: how much likelier the trainer finds what the engine sampled.

    Args:
        trainer_log_probs: [N], the trainer's old log-probs.
        engine_log_probs: [N].

    Returns:
        [N], positive and finite, without gradient.
    """
    return ratio(log_prob_difference(engine_log_probs.detach(), trainer_log_probs.detach()))


def truncate_factor(factor: Tensor, low: float, high: float) -> Tensor:
    """TIS: the importance factor [N] clipped into [low, high] (truncated importance sampling)."""
    return factor.clamp(low, high)


def mask_factor(factor: Tensor, low: float, high: float) -> Tensor:
    """IcePop: the importance factor [N], 0 outside [low, high]. Token weights stay, so numerators alone change."""
    return torch.where((factor >= low) & (factor <= high), factor, factor.new_zeros(()))


def effective_sample_size(weights: Tensor, mask: Tensor) -> float:
    """(sum w)^2 / (n sum w^2) over the trainable tokens: 1 if all importance weights are equal, 1/n if one has it all.

    Args:
        weights: [N], importance ratios or factors, 0 or more.
        mask: [N] bool, trainable tokens.

    Returns:
        In (0, 1]; NaN where there is no trainable token or every weight is 0.
    """
    check_flat(weights=weights, mask=mask)
    chosen = weights[mask].double()
    squares = float(chosen.square().sum())
    if squares == 0.0:
        return float("nan")
    return float(chosen.sum()) ** 2 / (chosen.numel() * squares)
