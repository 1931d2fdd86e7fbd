"""Sums over the samples of a flat ragged batch."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_bounds(lengths: Tensor) -> Tensor:
    """Where each sample begins, and the last one ends: [S] int64 to [S + 1] int64."""
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def count_per_sample(mask: Tensor, lengths: Tensor) -> Tensor:
    """Count the trainable tokens of each sample: mask [N] bool and lengths [S] to [S] int64."""
    running = torch.cat([lengths.new_zeros(1), mask.cumsum(0)])
    return running[sample_bounds(lengths)].diff()
