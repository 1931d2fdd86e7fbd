"""The critic's loss, and how well its values explain the returns."""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.functional.checks import check_flat


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> Tensor:
    """max((clip(V, V_old - c, V_old + c) - ret)^2, (V - ret)^2), with no factor 1/2 (arXiv 1707.06347).

    Args:
        values: [N], differentiable.
        old_values: [N], when the rollout was made.
        returns: [N].
        value_clip: c, how far a value may move before it has no gradient.

    Returns:
        [N].
    """
    check_flat(values=values, old_values=old_values, returns=returns)
    bounded = torch.maximum(torch.minimum(values, old_values + value_clip), old_values - value_clip)
    return torch.maximum((bounded - returns).square(), (values - returns).square())


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - var(returns - values) / var(returns) over the trainable tokens.

    1 is a perfect critic, 0 one that knows the mean alone, negative worse than that.

    Args:
        values: [N].
        returns: [N].
        mask: [N] bool, trainable tokens.

    Returns:
        NaN where it is undefined: fewer than two trainable tokens, or returns that are all equal.
    """
    check_flat(values=values, returns=returns, mask=mask)
    target = returns[mask].double()
    if target.numel() < 2:
        return float("nan")
    spread = float(target.var())
    if spread == 0.0:
        return float("nan")
    return 1.0 - float((target - values[mask].double()).var()) / spread
