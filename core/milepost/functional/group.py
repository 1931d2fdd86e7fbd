"""Comparisons within a group, the rollouts of one prompt. A rollout counts once, however many sequences it has."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from milepost.functional.checks import check_flat, check_ids


class GroupStatistics(NamedTuple):
    """What `group_statistics` returns; all [S], the value of each sample's own group, float64."""

    mean: Tensor
    std: Tensor
    """With n - 1; exactly 0 where all rewards of the group are equal, and for a group of one."""
    size: Tensor
    """Rollouts in the group."""


def group_statistics(rewards: Tensor, groups: Tensor, rollouts: Tensor) -> GroupStatistics:
    """Mean and standard deviation of the rewards of each sample's group, over rollouts.

    Args:
        rewards: [S], the outcome reward; sequences of one rollout carry the same.
        groups: [S] int64, samples of one prompt share one.
        rollouts: [S] int64, sequences of one rollout share one.

    Raises:
        ValueError: a reward is not finite, or sequences of one rollout differ in reward or group.
    """
    check_flat(rewards=rewards, groups=groups, rollouts=rollouts)
    check_ids(groups=groups, rollouts=rollouts)
    finite = torch.isfinite(rewards)
    if not bool(finite.all()):
        sample = int((~finite).nonzero()[0])
        raise ValueError(f"the reward of sample {sample} is {float(rewards[sample])}; rewards must be finite")
    first, rollout_of = _first_of_each(rollouts)
    for name, column in (("reward", rewards), ("group", groups)):
        differs = column != column[first][rollout_of]
        if bool(differs.any()):
            sample = int(differs.nonzero()[0])
            raise ValueError(
                f"sample {sample} has another {name} than the rest of its rollout {int(rollouts[sample])}; "
                f"sequences of one rollout share one {name}"
            )
    values = rewards[first].double()
    unique, group_of = torch.unique(groups[first], return_inverse=True)
    zeros = values.new_zeros(len(unique))
    count = zeros.index_add(0, group_of, torch.ones_like(values))
    mean = zeros.index_add(0, group_of, values) / count
    squares = zeros.index_add(0, group_of, (values - mean[group_of]).square())
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    low = zeros.scatter_reduce(0, group_of, values, "amin", include_self=False)
    high = zeros.scatter_reduce(0, group_of, values, "amax", include_self=False)
    constant = low == high
    std = torch.where(constant, 0.0, std)
    mean = torch.where(constant, low, mean)
    of_sample = group_of[rollout_of]
    return GroupStatistics(mean[of_sample], std[of_sample], count[of_sample])


def _first_of_each(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first position of each different id, in order of id, and which of them each position has."""
    unique, inverse = torch.unique(ids, return_inverse=True)
    positions = torch.arange(len(ids), device=ids.device)
    first = positions.new_zeros(len(unique)).scatter_reduce(0, inverse, positions, "amin", include_self=False)
    return first, inverse


def group_advantages(
    rewards: Tensor, groups: Tensor, rollouts: Tensor, *, normalize_std: bool = True, eps: float = 1e-6
) -> Tensor:
    """r - mean(group), divided by (std(group) + eps) where std > 0 (GRPO, arXiv 2402.03300).

    Without the division it is the advantage of Dr.GRPO (2503.20783). The standard deviation has n - 1.

    Args:
        rewards: [S].
        groups: [S] int64.
        rollouts: [S] int64.
        normalize_std: whether to divide.
        eps: added to the standard deviation.

    Returns:
        [S] float32; exactly 0 in a group whose rewards are all equal, a group of one included.

    Raises:
        ValueError: as `group_statistics`.
    """
    mean, std, _ = group_statistics(rewards, groups, rollouts)
    centered = rewards.double() - mean
    if normalize_std:
        centered = torch.where(std > 0, centered / (std + eps), 0.0)
    return centered.float()


def leave_one_out_advantages(rewards: Tensor, groups: Tensor, rollouts: Tensor) -> Tensor:
    """r - mean of the other rollouts of the group (RLOO, arXiv 2402.14740).

    It is (r - mean) x n / (n - 1), and computed as that.

    Returns:
        [S] float32; 0 in a group of one, which has no others.

    Raises:
        ValueError: as `group_statistics`.
    """
    mean, _, size = group_statistics(rewards, groups, rollouts)
    return ((rewards.double() - mean) * size / (size - 1).clamp(min=1)).float()
