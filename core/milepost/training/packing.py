"""Packing: the samples of a micro-batch in one row, with everything attention and the loss need to tell them apart.

A packed row [1, T] holds samples one after the other, positions restarting at 0. Attention never crosses a sample's
border, so its cost is the sum of squared lengths: `milepost.training.attention` brings samples of similar length
together (a bucket), pads them on the right, and attends causally, which needs no mask because nothing looks to the
right. Samples of nearly one length can be padded in the row itself, which then is a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from milepost.training.trainer import Batch

MAX_PADDING = 0.2
"""A sample joins a bucket if padding is at most this share of the bucket's longest sample."""
FREE_PADDING = 8
"""... or at most this many tokens: below that a kernel call costs more than the padding."""
LONG = 192
"""Samples of this many tokens go alone: padding and moving them costs more than a kernel call each."""
BATCH_PADDING = 0.1
"""A row becomes a batch of equally long samples if padding is at most this share of its tokens."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Samples of similar length, padded on the right to the longest."""

    samples: tuple[int, ...]
    """Their places in the row, the longest first."""
    length: int
    """L, tokens of the longest."""

    @property
    def num_tokens(self) -> int:
        """Tokens with padding."""
        return len(self.samples) * self.length


@dataclass(frozen=True)
class Layout:
    """Where each sample lies in a packed row of T tokens. What attention needs is made once, on first use."""

    lengths: tuple[int, ...]
    """Tokens of each sample, in the order of the row."""
    device: torch.device

    @cached_property
    def num_tokens(self) -> int:
        """T."""
        return sum(self.lengths)

    @cached_property
    def equal_length(self) -> int | None:
        """The length of every sample if all are equally long, so that regrouping is a view; else None."""
        return self.lengths[0] if len(set(self.lengths)) == 1 else None

    @cached_property
    def cumulative(self) -> Tensor:
        """[B + 1] int32, where each sample begins, and T at the end (FlashAttention's cu_seqlens)."""
        return torch.tensor((0, *self.lengths)).cumsum(0).to(self.device, torch.int32)

    @cached_property
    def positions(self) -> Tensor:
        """[1, T] int64, each token's position in its sample."""
        if self.equal_length is not None:
            return torch.arange(self.equal_length, device=self.device).repeat(len(self.lengths)).unsqueeze(0)
        starts = torch.repeat_interleave(self._starts, self._lengths)
        return (torch.arange(self.num_tokens) - starts).unsqueeze(0).to(self.device)

    @cached_property
    def sample_ids(self) -> Tensor:
        """[T] int64, the sample each token belongs to, counted in the order of the row."""
        return torch.repeat_interleave(torch.arange(len(self.lengths)), self._lengths).to(self.device)

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """Long samples one by one in the order of the row, then the others by similar length, the longest first."""
        members = [[index] for index, length in enumerate(self.lengths) if length >= LONG]
        others = [index for index, length in enumerate(self.lengths) if length < LONG]
        shortest = LONG
        for index in sorted(others, key=lambda i: -self.lengths[i]):
            length = self.lengths[index]
            if length < shortest:
                shortest = length - max(int(MAX_PADDING * length), FREE_PADDING)
                members.append([])
            members[-1].append(index)
        return tuple(Bucket(tuple(samples), self.lengths[samples[0]]) for samples in members)

    @cached_property
    def is_regrouped(self) -> bool:
        """Whether the buckets' order differs from the row's; if not, they are cut from the row as it is."""
        return min(self.lengths) < LONG

    @property
    def gather(self) -> Tensor:
        """[P] int64, the row's positions in the order of the buckets; padding repeats a sample's last token."""
        return self._regrouping[0]

    @property
    def restore(self) -> Tensor:
        """[T] int64, the inverse: where each token of the row lies among the P of the buckets."""
        return self._regrouping[1]

    @cached_property
    def _lengths(self) -> Tensor:
        return torch.tensor(self.lengths, dtype=torch.int64)

    @cached_property
    def _starts(self) -> Tensor:
        return self._lengths.cumsum(0) - self._lengths

    @cached_property
    def _regrouping(self) -> tuple[Tensor, Tensor]:
        gathers = []
        restore = torch.empty(self.num_tokens, dtype=torch.int64)
        base = 0
        for bucket in self.buckets:
            samples = torch.tensor(bucket.samples)
            steps = torch.arange(bucket.length)
            last = self._lengths[samples].unsqueeze(1) - 1
            gather = self._starts[samples].unsqueeze(1) + torch.minimum(steps, last)
            real = (steps <= last).flatten().nonzero().squeeze(1)
            gather = gather.flatten()
            restore[gather[real]] = base + real
            gathers.append(gather)
            base += bucket.num_tokens
        return torch.cat(gathers).to(self.device), restore.to(self.device)


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch as one row of T tokens, n of which carry loss."""

    layout: Layout
    tokens: Tensor
    """[1, T] int64."""
    trainable: Tensor
    """[n] int64, positions in the row of the trainable tokens, none of which is a sample's first."""
    targets: Tensor
    """[n] int64, the ids of those tokens."""
    columns: Tensor
    """[n] int64 on the CPU, positions of those tokens in the batch's columns."""


def pack(batch: Batch, samples: Sequence[int], device: torch.device, *, pad: bool = False) -> Packed:
    """Lay the given samples of a batch out as one row on `device`.

    With `pad`, samples of nearly one length are all padded on the right to the longest, each with its last token, so
    that the row is a batch [B, L] that needs no regrouping: nothing that is real sees the padding.

    Raises ValueError if a sample's first token is trainable: nothing precedes it, so it has no log-prob.
    """
    chosen = torch.tensor(samples, dtype=torch.int64)
    lengths = batch.lengths[chosen]
    longest, total = max(lengths.tolist(), default=0), int(lengths.sum())
    if total and len(samples) * longest <= (1 + BATCH_PADDING * pad) * total:
        layout = Layout((longest,) * len(samples), device)
        steps, last = torch.arange(longest), lengths.unsqueeze(1) - 1
        index = (batch.offsets[chosen].unsqueeze(1) + torch.minimum(steps, last)).flatten()
        mask = batch["mask"][index] & (steps <= last).flatten()
        first = torch.arange(len(samples)) * longest
    else:
        layout = Layout(tuple(lengths.tolist()), device)
        index = batch.token_index(samples)
        mask = batch["mask"][index]
        first = lengths.cumsum(0) - lengths
    if bool(mask[first].any()):
        sample = samples[int(mask[first].nonzero()[0])]
        raise ValueError(f"the first token of sample {sample} is trainable, but nothing precedes it; mask it out")
    tokens = batch["tokens"][index].to(device, torch.int64)
    trainable = mask.nonzero().squeeze(1)
    columns = index[trainable]
    trainable = trainable.to(device)
    return Packed(layout, tokens.unsqueeze(0), trainable, tokens[trainable], columns)
