"""Handing prompts out batch by batch, epoch after epoch, from a position that can be saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from milepost.config.sources import epoch_bounds
from milepost.data.tasks import Dataset
from milepost.errors import CheckpointError
from milepost.samples import Task


class PromptSource:
    """Hands a dataset's tasks out in batches, epoch after epoch, and remembers where it stands.

    An epoch's order depends on the seed and the epoch's number alone. A batch may run across the end of an epoch:
    every task comes up once per epoch and none is dropped. With weights, a task comes up `weight` times per epoch; a
    fraction takes that share of the source's tasks, and others in the next epoch until all have come up.
    """

    def __init__(self, dataset: Dataset, batch_size: int, shuffle: bool, seed: int) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        """Epoch the next task belongs to."""
        self.position = 0
        """Tasks of this epoch already handed out."""
        self._order = self._epoch_order(0)

    def next_batch(self) -> list[Task]:
        """Return the next `batch_size` tasks."""
        return self.take(self.batch_size)

    def take(self, count: int) -> list[Task]:
        """Return the next `count` tasks, for a batch of another size."""
        tasks: list[Task] = []
        while len(tasks) < count:
            chosen = self._order[self.position : self.position + count - len(tasks)]
            tasks += [self.dataset.tasks[i] for i in chosen]
            self.position += len(chosen)
            if self.position == len(self._order):
                self.epoch, self.position = self.epoch + 1, 0
                self._order = self._epoch_order(self.epoch)
        return tasks

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and what it is a position in, as plain JSON data."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "fingerprint": self.dataset.fingerprint,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved position; the batch size may be another.

        Raises:
            CheckpointError: if the data or its order is not what the position was saved in.
        """
        if state["fingerprint"] != self.dataset.fingerprint:
            raise CheckpointError(
                f"{self.dataset.name} has other prompts, labels or weights than when the checkpoint was made; restore "
                "the data and its settings, or start a new run with checkpoint.init_from"
            )
        saved = (state["shuffle"], state["seed"] if state["shuffle"] else self.seed)
        if saved != (self.shuffle, self.seed):
            raise CheckpointError(
                f"the checkpoint was made with data.shuffle {state['shuffle']} and run.seed {state['seed']}, now they "
                f"are {self.shuffle} and {self.seed}; go on with the saved ones, or start a new run with "
                "checkpoint.init_from"
            )
        self.epoch, self.position = state["epoch"], state["position"]
        self._order = self._epoch_order(self.epoch)

    def _epoch_order(self, epoch: int) -> list[int]:
        drawn: list[int] = []
        for number, span in enumerate(self.dataset.spans):
            count = span.stop - span.start
            for turn, start, stop in epoch_bounds(count, span.weight, epoch):
                order: Sequence[int] = range(count)
                if self.shuffle and stop - start < count:
                    # Which tasks make up a part of a pass is drawn once per pass, so that its parts are disjoint.
                    order = self._permutation((self.seed, number + 1, turn + 1), count)
                drawn += [span.start + i for i in order[start:stop]]
        if not self.shuffle:
            return drawn
        return [drawn[i] for i in self._permutation((self.seed, epoch), len(drawn))]

    @staticmethod
    def _permutation(key: tuple[int, ...], count: int) -> Sequence[int]:
        # The bit generator is named: numpy may change what default_rng uses, and a resumed run must see this order.
        permuted: list[int] = np.random.Generator(np.random.PCG64(key)).permutation(count).tolist()
        return permuted
