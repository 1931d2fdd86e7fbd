"""Whitening: zero mean and unit variance over all trainable tokens of a rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.functional.checks import check_flat


def whiten(x: Tensor, mask: Tensor, *, eps: float = 1e-8) -> Tensor:
    """(x - mean) * rsqrt(var + eps), with mean and var (n - 1) over the trainable tokens.

    Args:
        x: [N] float.
        mask: [N] bool, trainable tokens.
        eps: added to the variance.

    Returns:
        [N] of x's dtype, zero where masked; all zero where the trainable tokens are equal, or fewer than two.
    """
    check_flat(x=x, mask=mask)
    result = torch.zeros_like(x)
    chosen = x[mask]
    count = chosen.numel()
    if count < 2:
        return result
    # The mean is summed in float64 but subtracted in the values' dtype; the second pass removes what that rounded.
    centered = chosen - chosen.sum(dtype=torch.float64) / count
    centered = centered - centered.sum(dtype=torch.float64) / count
    variance = centered.square().sum(dtype=torch.float64) / (count - 1)
    result[mask] = centered * torch.rsqrt(variance + eps)
    return result
