"""What one rank runs of a micro-batch: its tokens of a packed row, under context and sequence parallelism.

Context parallelism cuts each sample into 2 x C equal chunks, of which rank r holds chunks r and 2C - 1 - r (zig-zag):
an early and a late one, so that causal attention costs every rank the same. Samples are padded at their end until they
divide. A token's log-prob is read from the hidden state of the token before it, so the rank that holds that one has
the token's loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.training.inputs import SampleIndex
from milepost.training.packing import Layout, Packed, pack
from milepost.training.trainer import Batch


@dataclass(frozen=True, slots=True)
class Half:
    """One chunk of every sample (the early or the late one), and the keys that its tokens see."""

    queries: Tensor
    """[q] int64, positions in the rank's row."""
    keys: Tensor
    """[k] int64, positions among the tokens of all ranks, one rank after the other."""
    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    """Per sample; the last query sees all keys, the one before all but the last, and so on."""


@dataclass(frozen=True, slots=True)
class Attendance:
    """Who sees whom in a row of T local tokens."""

    layout: Layout
    """The samples with their padding, over all context-parallel ranks."""
    positions: Tensor
    """[T] int64, each local token's position in its sample."""
    halves: tuple[Half, Half] | None = None
    """None without context parallelism: the layout says it all."""


@dataclass(frozen=True, slots=True)
class Row:
    """One rank's part of a micro-batch: T local tokens, n of which read a trainable token's log-prob."""

    tokens: Tensor
    """[1, T] int64, padding included."""
    attendance: Attendance
    before: Tensor
    """[n] int64, positions in the row of the tokens before the trainable ones."""
    targets: Tensor
    """[n] int64, ids of the trainable tokens."""
    columns: Tensor
    """[n] int64 on the CPU, positions of the trainable tokens in the batch's columns."""
    sample_ids: Tensor
    """[n] int64, the sample of each trainable token."""
    num_samples: int
    num_tokens: int
    """Local tokens without padding."""

    def index(self) -> SampleIndex:
        """The trainable tokens alone, by sample, without context parallelism's reduction."""
        mask = torch.ones_like(self.before, dtype=torch.bool)
        return SampleIndex(mask, self.sample_ids, self.num_samples)


def make_row(
    batch: Batch, samples: Sequence[int], device: torch.device, *, context: int = 1, rank: int = 0, tensor: int = 1
) -> Row:
    """Lay out a rank's part of a micro-batch.

    Args:
        batch: the rollout.
        samples: which of its samples; none is filler, a short row without a trainable token.
        device: where the row goes.
        context: context-parallel ranks.
        rank: this one among them.
        tensor: ranks that share activations along the sequence, which must divide T.

    Raises:
        ValueError: a sample's first token is trainable.
    """
    cpu = torch.device("cpu")
    packed = pack(batch, samples, cpu) if samples else _filler()
    padded = padded_lengths(packed.layout.lengths, context, tensor)
    layout = Layout(padded, device)
    starts = [0, *torch.tensor(padded).cumsum(0).tolist()]
    local = local_tokens(padded, starts, context, rank)
    lengths = torch.tensor(packed.layout.lengths)
    # Where each token of the unpadded row lies in the padded one.
    shift = torch.tensor(starts[:-1]) - (lengths.cumsum(0) - lengths)
    placed = torch.arange(packed.layout.num_tokens) + torch.repeat_interleave(shift, lengths)
    tokens = torch.zeros(starts[-1], dtype=torch.int64)
    tokens[placed] = packed.tokens[0]
    real = torch.zeros(starts[-1], dtype=torch.bool)
    real[placed] = True
    place = torch.full((starts[-1],), -1, dtype=torch.int64)
    place[local] = torch.arange(len(local))
    before = place[placed[packed.trainable - 1]]
    mine = before >= 0
    positions = local - torch.repeat_interleave(torch.tensor(starts[:-1]), torch.tensor(padded))[local]
    halves = _halves(padded, starts, context, rank, device) if context > 1 else None
    return Row(
        tokens=tokens[local].unsqueeze(0).to(device),
        attendance=Attendance(layout, positions.to(device), halves),
        before=before[mine].to(device),
        targets=packed.targets[mine].to(device),
        columns=packed.columns[mine],
        sample_ids=packed.layout.sample_ids[packed.trainable][mine].to(device),
        num_samples=len(lengths),
        num_tokens=int(real[local].sum()) if samples else 0,
    )


def _filler() -> Packed:
    nothing = torch.zeros(0, dtype=torch.int64)
    layout = Layout((1,), torch.device("cpu"))
    return Packed(layout, torch.zeros(1, 1, dtype=torch.int64), nothing, nothing, nothing)


def padded_lengths(lengths: Sequence[int], context: int, tensor: int) -> tuple[int, ...]:
    """Return the samples' lengths with padding: multiples of 2 x context, their sum one of context x tensor.

    The last sample takes what padding the sum needs.
    """
    unit = 2 * context if context > 1 else 1
    padded = [-(-length // unit) * unit for length in lengths]
    whole = math.lcm(unit, context * tensor)
    padded[-1] += -sum(padded) % whole
    return tuple(padded)


def local_tokens(padded: Sequence[int], starts: Sequence[int], context: int, rank: int) -> Tensor:
    """Return [T] int64, the positions in the padded row of what a context-parallel rank holds, in its order."""
    if context == 1:
        return torch.arange(starts[len(padded)])
    parts = []
    for start, length in zip(starts, padded, strict=False):
        chunk = length // (2 * context)
        for piece in (rank, 2 * context - 1 - rank):
            parts.append(torch.arange(start + piece * chunk, start + (piece + 1) * chunk))
    return torch.cat(parts)


def _halves(
    padded: Sequence[int], starts: Sequence[int], context: int, rank: int, device: torch.device
) -> tuple[Half, Half]:
    everyone = torch.cat([local_tokens(padded, starts, context, other) for other in range(context)])
    gathered = torch.empty_like(everyone)
    gathered[everyone] = torch.arange(len(everyone))
    chunks = [length // (2 * context) for length in padded]
    first = torch.tensor([0, *(2 * chunk for chunk in chunks)]).cumsum(0).tolist()

    def half(piece: int, late: int) -> Half:
        queries = [
            torch.arange(at + late * chunk, at + (late + 1) * chunk) for at, chunk in zip(first, chunks, strict=False)
        ]
        seen = tuple((piece + 1) * chunk for chunk in chunks)
        keys = [gathered[start : start + count] for start, count in zip(starts, seen, strict=False)]
        return Half(torch.cat(queries).to(device), torch.cat(keys).to(device), tuple(chunks), seen)

    return half(rank, 0), half(2 * context - 1 - rank, 1)
