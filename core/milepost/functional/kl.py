"""Estimators of the KL divergence from the reference, one value per token (joschu.net/blog/kl-approx)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from milepost.functional.checks import check_flat
from milepost.functional.ratios import finite_or_zero

KLEstimator = Literal["k1", "k2", "k3", "low_var_kl"]
KL_ESTIMATORS: tuple[KLEstimator, ...] = get_args(KLEstimator)


def kl_divergence(log_probs: Tensor, ref_log_probs: Tensor, estimator: KLEstimator) -> Tensor:
    """Estimate KL(policy || reference) at each token from the log-probs of what was sampled.

    With x = logp - logp_ref: k1 = x; k2 = x^2 / 2; k3 = exp(-x) - 1 + x; low_var_kl = k3 with x clamped to +-20 and
    the result to +-10. k1 and k3 are unbiased, k2 and k3 are never negative. A non-finite x counts as 0.

    Args:
        log_probs: [N], differentiable.
        ref_log_probs: [N].
        estimator: one of `KL_ESTIMATORS`.

    Returns:
        [N]. k3 overflows for x under -88 in float32; low_var_kl is always finite.

    Raises:
        ValueError: the estimator is unknown.
    """
    check_flat(log_probs=log_probs, ref_log_probs=ref_log_probs)
    x = finite_or_zero(log_probs - ref_log_probs)
    match estimator:
        case "k1":
            return x
        case "k2":
            return x.square() / 2
        case "k3":
            return torch.expm1(-x) + x
        case "low_var_kl":
            x = x.clamp(-20.0, 20.0)
            return (torch.expm1(-x) + x).clamp(-10.0, 10.0)
    raise ValueError(f"unknown KL estimator {estimator!r}; expected one of {', '.join(KL_ESTIMATORS)}")
