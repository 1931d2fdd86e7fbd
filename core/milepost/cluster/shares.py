"""What each data-parallel rank holds of a batch: its own samples, and every column once.

A rank keeps what it was sent and what it computed itself until the next rollout, so that a column which several calls
read crosses the controller once. Columns are known by identity: one that was replaced, or changed in place, is sent
anew.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from milepost.training.schedule import Schedule, StepSchedule
from milepost.training.trainer import Batch

FORWARD_COLUMNS = ("tokens", "mask")
"""What a forward pass reads."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """What one data-parallel rank is handed for one call; n tokens of its own samples."""

    lengths: NDArray[np.int64] | None
    """Tokens of each sample, where they are others than the rank holds: it forgets what it held."""
    arrays: Mapping[int, NDArray[np.generic]]
    """New columns [n] by handle."""
    columns: Mapping[str, int]
    """Handles of the columns that the call reads."""
    keep: Mapping[str, int] = field(default_factory=dict)
    """Handles under which the rank is to keep what the call computes."""


class Shares:
    """The controller's side: which rank holds what.

    Args:
        data_parallel: number of data-parallel ranks.
        keep_results: whether a rank may keep what it computes: not where several ranks share each sample.
    """

    def __init__(self, data_parallel: int, *, keep_results: bool) -> None:
        self._keep_results = keep_results
        self._batch: Batch | None = None
        self._held: list[list[int]] = [[] for _ in range(data_parallel)]
        self._places: list[dict[int, int]] = [{} for _ in range(data_parallel)]
        self._index: list[Tensor] = []
        self._columns: list[tuple[Tensor, int, int]] = []
        """Column, its version (torch counts changes in place), and handle."""
        self._next_handle = 0
        self.bytes_moved = 0
        """Bytes of columns sent to ranks and received from them, each data-parallel rank counted once."""

    def deliver(
        self, steps: Sequence[StepSchedule], batch: Batch, names: Collection[str], results: Collection[str] = ()
    ) -> list[Delivery]:
        """Return what each rank is handed for a call on these steps that reads `names` and computes `results`."""
        lengths = self._lay_out(steps, batch)
        handles = {name: self._handle(batch[name]) for name in names}
        keep: dict[str, int] = {}
        if self._keep_results:
            for name in results:
                keep[name] = self._next_handle
                self._next_handle += 1
        new = {name: handle for name, (handle, is_new) in handles.items() if is_new}
        columns = {name: handle for name, (handle, _) in handles.items()}
        deliveries = []
        for rank, index in enumerate(self._index):
            arrays = {handle: batch[name][index].numpy() for name, handle in new.items()}
            self.bytes_moved += sum(array.nbytes for array in arrays.values())
            deliveries.append(Delivery(None if lengths is None else lengths[rank], arrays, columns, keep))
        return deliveries

    def _lay_out(self, steps: Sequence[StepSchedule], batch: Batch) -> list[NDArray[np.int64]] | None:
        """See that every rank holds its samples of these steps; return the lengths of all it holds if they changed."""
        wanted = [sorted(i for step in steps for part in step.ranks[r] for i in part) for r in range(len(self._held))]
        if self._batch is batch and all(
            places.keys() >= set(samples) for places, samples in zip(self._places, wanted, strict=True)
        ):
            return None
        self._batch, self._held, self._columns = batch, wanted, []
        self._places = [{sample: place for place, sample in enumerate(samples)} for samples in wanted]
        self._index = [batch.token_index(samples) for samples in wanted]
        return [batch.lengths[torch.tensor(samples, dtype=torch.int64)].numpy() for samples in wanted]

    def _handle(self, column: Tensor) -> tuple[int, bool]:
        """Return a column's handle, and whether ranks have yet to be sent it."""
        for known, version, handle in self._columns:
            if known is column and version == column._version:
                return handle, False
        return self._register(column, self._next_handle), True

    def _register(self, column: Tensor, handle: int) -> int:
        self._columns.append((column, column._version, handle))
        self._next_handle = max(self._next_handle, handle + 1)
        return handle

    def local(self, step: StepSchedule, rank: int) -> StepSchedule:
        """Return a step as one rank sees it: its own micro-batches, by the places of the samples it holds."""
        places = self._places[rank]
        ranks = tuple(
            tuple(tuple(places[i] for i in part) for part in parts) if r == rank else ((),) * len(parts)
            for r, parts in enumerate(step.ranks)
        )
        return StepSchedule(ranks, step.num_tokens)

    def merge(
        self, deliveries: Sequence[Delivery], computed: Sequence[Sequence[Mapping[str, NDArray[np.float32]]]]
    ) -> dict[str, Tensor]:
        """Put together what ranks computed: for each data-parallel rank the columns [n] of its trainer ranks.

        What several trainer ranks return for one data-parallel rank adds up, as they hold parts of the same samples.
        Returns columns [N] of the whole batch, zero for samples that no step had.
        """
        assert self._batch is not None, "deliver comes first"
        merged: dict[str, Tensor] = {}
        for index, parts in zip(self._index, computed, strict=True):
            for columns in parts:
                for name, column in columns.items():
                    target = merged.setdefault(name, torch.zeros(self._batch.num_tokens))
                    target[index] += torch.tensor(column)
                    self.bytes_moved += column.nbytes
        for name, handle in deliveries[0].keep.items():
            if name in merged:
                self._register(merged[name], handle)
        return merged


class Share:
    """A rank's side: the samples it holds, and their columns by handle."""

    def __init__(self) -> None:
        self._lengths = torch.zeros(0, dtype=torch.int64)
        self._columns: dict[int, Tensor] = {}

    def take(self, delivery: Delivery) -> Batch:
        """Take a delivery in and return the batch that the call is to run on."""
        if delivery.lengths is not None:
            self._lengths = torch.tensor(delivery.lengths)
            self._columns.clear()
        for handle, array in delivery.arrays.items():
            # Arrays come in read-only memory of the object store.
            self._columns[handle] = torch.tensor(array)
        return Batch(self._lengths, {name: self._columns[handle] for name, handle in delivery.columns.items()})

    def keep(self, delivery: Delivery, columns: Mapping[str, Tensor]) -> None:
        """Keep what a call computed under the handles that the delivery named."""
        for name, handle in delivery.keep.items():
            if name in columns:
                self._columns[handle] = columns[name]


def local_schedule(shares: Shares, schedule: Schedule, rank: int) -> Schedule:
    """Return a rollout's schedule as one rank sees it."""
    return Schedule(tuple(shares.local(step, rank) for step in schedule.steps), schedule.warnings)
