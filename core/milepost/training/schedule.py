"""The batch schedule: which samples go into which micro-batch of which rank, for every optimizer step.

A pure function of lengths and numbers, run once by the controller. Nothing is dropped; counts of micro-batches are
equal across ranks; ranks are balanced by cost.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepSchedule:
    """One optimizer step."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    """`ranks[r][m]` are the sample indices of micro-batch m of data-parallel rank r; an empty tuple is filler."""
    num_tokens: int
    """Tokens of all samples in the step, over all ranks."""

    @property
    def samples(self) -> tuple[int, ...]:
        """All sample indices of the step."""
        return tuple(i for rank in self.ranks for micro_batch in rank for i in micro_batch)


@dataclass(frozen=True, slots=True)
class Schedule:
    """All optimizer steps of one rollout."""

    steps: tuple[StepSchedule, ...]
    warnings: tuple[str, ...] = ()
