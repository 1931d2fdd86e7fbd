"""What data-parallel ranks share between backward pass and optimizer.

Every rank sees its own samples, and holds the whole model or its part of it (`milepost.training.sharding`, which sums
gradients by itself). Token weights already carry the normalisation over the whole optimizer step, so gradients are
summed, never averaged, and no rank divides.
"""

from __future__ import annotations

from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from milepost.training.losses import MetricState


class Ranks(Protocol):
    """The data-parallel ranks a trainer belongs to; every call is made on all of them together."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        ...

    @property
    def size(self) -> int:
        """Number of ranks."""
        ...

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Sum flat gradients over ranks, in place; afterwards all ranks hold the same bits."""
        ...

    def combine_metrics(self, state: MetricState) -> MetricState:
        """Reduce metric sums over ranks; all ranks get the same."""
        ...


class SingleRank:
    """One rank: it has everything already."""

    rank = 0
    size = 1

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Sum flat gradients over ranks, in place."""

    def combine_metrics(self, state: MetricState) -> MetricState:
        """Reduce metric sums over ranks."""
        return state


class DataParallelRanks:
    """Ranks of the default `torch.distributed` group (gloo on CPUs, NCCL on GPUs).

    A loss or gradient that is not finite on one rank is not finite in the sums of all, so all skip the step alike.
    """

    def __init__(self) -> None:
        """Take part in the group. Raises RuntimeError if `torch.distributed` was not initialised."""
        if not dist.is_initialized():
            raise RuntimeError("torch.distributed is not initialised; call init_process_group on every rank first")
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def sum_gradients(self, gradients: list[Tensor]) -> None:
        """Sum flat gradients over ranks, in place; afterwards all ranks hold the same bits."""
        for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
            work.wait()

    def combine_metrics(self, state: MetricState) -> MetricState:
        """Reduce metric sums over ranks: by sum, max and min."""
        combined = MetricState(*(part.clone() for part in state))
        operations = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
        for part, operation in zip(combined, operations, strict=True):
            if part.numel():
                dist.all_reduce(part, op=operation)
        return combined
