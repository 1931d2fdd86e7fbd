"""One declarative list of how a model's Hugging Face tensors become a Megatron model's, played both ways.

A rule names one Megatron tensor and the Hugging Face tensors it is made of. Under tensor parallelism every rank holds
an equal, contiguous share of each part, so a rule works per shard exactly as it works on whole tensors: cut each part,
merge the cuts. Backwards, split a shard into its cuts, and put those of all ranks side by side.

    Conversion("mlp.linear_fc1.weight", (Part("mlp.gate_proj.weight", (F, H)), Part("mlp.up_proj.weight", (F, H))), 0)

Rules know shapes and names alone; nothing here imports Megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

LAYER = "{layer}"
"""Stands in a rule's names for the number of the layer, counted from 0 over the whole model."""


@dataclass(frozen=True, slots=True)
class Part:
    """One whole Hugging Face tensor that goes into a Megatron tensor."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Conversion:
    """How one Megatron tensor is made of Hugging Face tensors.

    Raises ValueError if parts of different rank or trailing shape are merged, blocks do not divide them, or an expert's
    tensor is split.
    """

    megatron: str
    """Name in a whole (not pipelined) Megatron model."""
    parts: tuple[Part, ...]
    """Merged along dimension 0, in this order."""
    split: int | None = None
    """Dimension that tensor-parallel ranks share; None where every rank has all of it."""
    blocks: int | None = None
    """The merged tensor is this many blocks, each holding an equal piece of every part (query groups: [q k v] [q k v]).
    None: one block on each rank ([gate up] on every rank)."""
    padded: int | None = None
    """Extent of dimension 0 with padding (the vocabulary's); None for no padding."""
    expert: int | None = None
    """The expert, counted from 0 over the whole layer, that the tensor belongs to; only the expert-parallel rank that
    has that expert holds it, whole. Megatron's name is then that of a model without expert parallelism."""

    def __post_init__(self) -> None:
        if len({(len(part.shape), part.shape[1:]) for part in self.parts}) != 1:
            raise ValueError(f"{self.megatron}: parts {[part.shape for part in self.parts]} cannot be merged")
        if self.blocks is not None and any(part.shape[0] % self.blocks for part in self.parts):
            raise ValueError(f"{self.megatron}: {self.blocks} blocks do not divide {[p.shape for p in self.parts]}")
        if self.padded is not None and (len(self.parts) > 1 or self.split != 0 or self.padded < self.parts[0].shape[0]):
            raise ValueError(f"{self.megatron}: only one part that is split along 0 can be padded")
        if self.expert is not None and self.split is not None:
            raise ValueError(f"{self.megatron}: tensor-parallel ranks do not share an expert, leave split at None")

    @property
    def per_layer(self) -> bool:
        """Whether there is one such tensor in every layer."""
        return LAYER in self.megatron

    def at(self, layer: int) -> Conversion:
        """Return the rule of one layer."""
        parts = tuple(replace(part, name=part.name.replace(LAYER, str(layer))) for part in self.parts)
        return replace(self, megatron=self.megatron.replace(LAYER, str(layer)), parts=parts)

    def cut(self, part: Part, rank: int, size: int) -> tuple[tuple[int, int], ...]:
        """Return start and stop along each dimension of what a tensor-parallel rank holds of a part.

        With padding the last ranks hold less, down to nothing. Raises ValueError if the ranks do not divide the part.
        """
        whole = [(0, extent) for extent in part.shape]
        if self.split is None or size == 1:
            return tuple(whole)
        extent = part.shape[self.split] if self.padded is None else self.padded
        blocks = self.blocks or size
        if extent % size or (len(self.parts) > 1 and blocks % size):
            raise ValueError(
                f"{part.name} has {extent} rows or columns in {blocks} blocks, which {size} tensor-parallel ranks do "
                "not divide; choose another trainer.tensor_parallel"
            )
        share = extent // size
        real = part.shape[self.split]
        whole[self.split] = (min(rank * share, real), min((rank + 1) * share, real))
        return tuple(whole)

    def merge(self, cuts: Sequence[Tensor], size: int = 1) -> Tensor:
        """Make one rank's Megatron tensor of its cuts; `size` is the number of tensor-parallel ranks.

        Padding is zero.
        """
        if len(cuts) == 1:
            only = cuts[0]
            missing = 0 if self.padded is None else self.padded // size - only.shape[0]
            return only if not missing else torch.cat([only, only.new_zeros(missing, *only.shape[1:])])
        blocks = self._local_blocks(size)
        grouped = [cut.reshape(blocks, -1, *cut.shape[1:]) for cut in cuts]
        return torch.cat(grouped, 1).flatten(0, 1)

    def divide(self, tensor: Tensor, rank: int = 0, size: int = 1) -> list[Tensor]:
        """Take one rank's Megatron tensor apart into its cuts; the inverse of `merge`."""
        if len(self.parts) == 1:
            start, stop = self.cut(self.parts[0], rank, size)[0]
            return [tensor[: stop - start]] if self.padded is not None else [tensor]
        blocks = self._local_blocks(size)
        share = size if self.split == 0 else 1
        rows = [part.shape[0] // share // blocks for part in self.parts]
        pieces = torch.split(tensor.view(blocks, sum(rows), *tensor.shape[1:]), rows, 1)
        return [piece.flatten(0, 1) for piece in pieces]

    def join(self, shards: Sequence[Tensor]) -> list[Tensor]:
        """Make whole Hugging Face tensors of the Megatron tensors of all tensor-parallel ranks, in rank order."""
        size = len(shards)
        if self.split is None or size == 1:
            return self.divide(shards[0])
        cuts = [self.divide(shard, rank, size) for rank, shard in enumerate(shards)]
        return [torch.cat([cut[index] for cut in cuts], self.split) for index in range(len(self.parts))]

    def _local_blocks(self, size: int) -> int:
        if self.blocks is None:
            return 1
        return self.blocks // size if self.split == 0 else self.blocks


def all_layers(conversions: Sequence[Conversion], num_layers: int) -> Iterator[Conversion]:
    """Yield the rules of every tensor of the model: those before the layers, the layers', those behind them.

    A rule before the first per-layer rule comes before the layers.
    """
    first = next((i for i, rule in enumerate(conversions) if rule.per_layer), len(conversions))
    yield from conversions[:first]
    for layer in range(num_layers):
        yield from (rule.at(layer) for rule in conversions if rule.per_layer)
    yield from (rule for rule in conversions[first:] if not rule.per_layer)
