"""What a trainer is: the same calls for torch and Megatron, for one rank and many.

The controller decides (schedule, token weights, advantages) and ranks compute. A `Batch` holds the rollout's columns,
flat over all tokens; a `StepSchedule` says which samples go into which micro-batch of which rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from milepost.training.schedule import Schedule, StepSchedule

if TYPE_CHECKING:
    from milepost.weights.transport import WeightSource, World

Role = Literal["actor", "critic", "reference", "teacher"]
Part = Literal["weights", "gradients", "optimizer"]
Want = Literal["log_probs", "entropy", "values"]


class Batch:
    """The columns of one rollout: S samples, N tokens, flat tensors [N] with one entry per token.

    Columns: `tokens` int32, `mask` bool, and as they come to exist, all float32: `engine_log_probs`, `old_log_probs`,
    `ref_log_probs`, `teacher_log_probs`, `values`, `advantages`, `returns`, `weights` (the loss weight of each token
    in its optimizer step).
    """

    def __init__(self, lengths: Tensor, columns: Mapping[str, Tensor]) -> None:
        self.lengths = lengths
        """[S] int64."""
        self.columns = dict(columns)
        self.offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        """[S + 1] int64."""
        for name in self.columns:
            self._check(name)

    def __contains__(self, name: str) -> bool:
        return name in self.columns

    def __getitem__(self, name: str) -> Tensor:
        return self.columns[name]

    def __setitem__(self, name: str, column: Tensor) -> None:
        self.columns[name] = column
        self._check(name)

    def _check(self, name: str) -> None:
        expected = int(self.offsets[-1])
        if self.columns[name].shape != (expected,):
            raise ValueError(f"column {name!r} has shape {tuple(self.columns[name].shape)}, expected ({expected},)")

    @property
    def num_samples(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        """N."""
        return int(self.offsets[-1])

    @property
    def bytes_per_token(self) -> float:
        """Bytes that all columns take per token; at most 40 may pass the controller."""
        return sum(column.element_size() for column in self.columns.values())

    def token_index(self, samples: Collection[int]) -> Tensor:
        """Positions [n] of the tokens of these samples, in their order."""
        chosen = torch.as_tensor(list(samples), dtype=torch.int64)
        lengths = self.lengths[chosen]
        ends = lengths.cumsum(0)
        shift = self.offsets[chosen] - (ends - lengths)
        return torch.arange(int(lengths.sum())) + torch.repeat_interleave(shift, lengths)

    def select(self, samples: Collection[int], names: Collection[str] | None = None) -> Batch:
        """Return the given samples alone, in the given order."""
        index = self.token_index(samples)
        wanted = self.columns if names is None else {name: self.columns[name] for name in names}
        lengths = self.lengths[torch.as_tensor(list(samples), dtype=torch.int64)]
        return Batch(lengths, {name: column[index] for name, column in wanted.items()})


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one optimizer step reports, the same on every rank."""

    metrics: Mapping[str, float]
    """Reduced over the step: `loss`, `grad_norm`, `lr`, and what the loss gave."""
    skipped: bool = False
    """The loss or gradient was not finite, so no rank applied the step."""


class Trainer(Protocol):
    """Holds the roles' weights and optimizers; every call is made on all ranks together."""

    @property
    def world(self) -> World:
        """The ranks, where they stand and their parallel coordinates."""
        ...

    def forward(self, role: Role, schedule: Schedule, batch: Batch, want: Collection[Want]) -> dict[str, Tensor]:
        """Run the role over the batch with the packing of the training steps, without gradients.

        Returns one flat column [N] float32 per wanted name, on the CPU, zero where a token is not trainable.
        """
        ...

    def step(self, role: Role, schedule: StepSchedule, batch: Batch) -> StepResult:
        """Accumulate gradients over the step's micro-batches and apply the optimizer once."""
        ...

    def offload(self, role: Role, parts: Collection[Part]) -> None:
        """Move these parts of the role to host memory; nothing happens where they are not on the device."""
        ...

    def onload(self, role: Role, parts: Collection[Part]) -> None:
        """Bring these parts of the role back to the device."""
        ...

    def source(self, role: Role) -> WeightSource:
        """The role's weights under Hugging Face names, for a transport or an export."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and random state of all trained roles into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError if it does not fit this run."""
        ...

    def close(self) -> None:
        """Release everything; the trainer is not used again."""
        ...
