"""What the checks of losses and estimators do with tensors."""

from __future__ import annotations

import torch
from torch import Tensor


def garbage(like: Tensor, mask: Tensor, number: float) -> Tensor:
    """A copy of a column [N] with `number` wherever it is masked."""
    return torch.where(mask, like, torch.full_like(like, number))
