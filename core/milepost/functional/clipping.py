"""Clipped policy objectives, one loss value per token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from milepost.functional.checks import check_flat


class ClippedLoss(NamedTuple):
    """What `clipped_policy_loss` returns."""

    values: Tensor
    """[N], differentiable through the ratio."""
    clipped: Tensor
    """[N] bool, tokens whose ratio was clipped, so that no gradient flows."""
    dual_clipped: Tensor
    """[N] bool, tokens where the dual clip took over; none without it."""


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, eps_clip: float, eps_clip_high: float, dual_clip: float | None = None
) -> ClippedLoss:
    """max(-rho A, -clip(rho, 1 - eps, 1 + eps_high) A); with c and A < 0: min(that, -c A).

    PPO (arXiv 1707.06347) and GRPO (2402.03300); a wider upper side is clip-higher (DAPO, 2503.14476); c is the dual
    clip (1912.09729), which bounds what a bad token with a large ratio can do.

    Args:
        ratio: [N], differentiable; per token or, for GSPO, per sequence.
        advantages: [N].
        eps_clip: how far under 1 the ratio counts.
        eps_clip_high: how far over 1 the ratio counts.
        dual_clip: c > 1, or None for no dual clip.

    Raises:
        ValueError: dual_clip is not over 1.
    """
    check_flat(ratio=ratio, advantages=advantages)
    if dual_clip is not None and dual_clip <= 1.0:
        raise ValueError(f"dual_clip is {dual_clip}, expected a number over 1, or None to turn it off")
    plain = -ratio * advantages
    bounded = -ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages
    values = torch.maximum(plain, bounded)
    clipped = (bounded > plain).detach()
    if dual_clip is None:
        return ClippedLoss(values, clipped, torch.zeros_like(clipped))
    ceiling = -dual_clip * advantages
    dual_clipped = ((advantages < 0) & (values > ceiling)).detach()
    return ClippedLoss(torch.where(dual_clipped, ceiling, values), clipped, dual_clipped)


def cispo_loss(ratio: Tensor, advantages: Tensor, log_probs: Tensor, eps_clip: float, eps_clip_high: float) -> Tensor:
    """-stop_gradient(clip(rho, 1 - eps, 1 + eps_high)) A logp (CISPO, arXiv 2506.13585).

    Args:
        ratio: [N]; no gradient flows through it.
        advantages: [N].
        log_probs: [N], differentiable.
        eps_clip: how far under 1 the ratio counts.
        eps_clip_high: how far over 1 the ratio counts.

    Returns:
        [N]; every token keeps a gradient, clipped or not.
    """
    check_flat(ratio=ratio, advantages=advantages, log_probs=log_probs)
    return -ratio.detach().clamp(1.0 - eps_clip, 1.0 + eps_clip_high) * advantages * log_probs
