"""REINFORCE++ with a group baseline."""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.functional.checks import check_flat, check_ragged
from milepost.functional.group import group_advantages


def baseline_advantages(
    rewards: Tensor,
    groups: Tensor,
    rollouts: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    kl: Tensor | None = None,
    beta: float = 0.0,
) -> Tensor:
    """(R - group mean) - beta kl_t (REINFORCE++ baseline, arXiv 2501.03262), before whitening.

    Args:
        rewards: [S], outcome rewards R.
        groups: [S] int64, samples of one prompt share one.
        rollouts: [S] int64, sequences of one rollout share one.
        mask: [N] bool, trainable tokens.
        lengths: [S] int64, tokens per sample.
        kl: [N], KL estimate of each token; None for no KL term.
        beta: its weight.

    Returns:
        [N] float32, zero where masked.

    Raises:
        ValueError: as `group.group_statistics`, or shapes disagree.
    """
    num_tokens = check_flat(mask=mask, kl=kl)
    check_flat(rewards=rewards, lengths=lengths)
    check_ragged(lengths, num_tokens)
    centered = group_advantages(rewards, groups, rollouts, normalize_std=False)
    spread = torch.repeat_interleave(centered, lengths, output_size=num_tokens)
    if kl is not None:
        spread = spread - beta * kl
    return torch.where(mask, spread, spread.new_zeros(()))
