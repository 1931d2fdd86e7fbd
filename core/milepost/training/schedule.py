"""The batch schedule: which samples go into which micro-batch of which rank, for every optimizer step.

A pure function of lengths and numbers, run once by the controller. Nothing is dropped; counts of micro-batches are
equal across ranks; ranks are balanced by cost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from milepost.errors import ConfigError, Problem


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


def make_schedule(
    lengths: Sequence[int],
    rollouts: Sequence[int],
    *,
    data_parallel: int,
    global_batch_size: int,
    steps_per_rollout: int,
    token_budget: int,
    cost: Callable[[int], float] | None = None,
    interleave: int = 1,
    overlong: Literal["warn", "error"] = "warn",
) -> Schedule:
    """Deal samples out to optimizer steps, ranks and micro-batches.

    Rollouts are taken in order of first appearance, `global_batch_size` of them per step; the samples of one rollout
    stay in one step. Within a step, samples go to the rank that has least to do, costliest first (LPT); a rank's
    samples are packed into as few micro-batches as first-fit decreasing finds for the token budget, and then spread
    over the common number of micro-batches, again evenly by cost. Samples of a micro-batch are in ascending order,
    micro-batches in descending order of cost with the filler last.

    Args:
        lengths: tokens of each sample, 1 or more.
        rollouts: rollout id of each sample.
        data_parallel: number of data-parallel ranks.
        global_batch_size: rollouts per optimizer step.
        steps_per_rollout: optimizer steps.
        token_budget: tokens one micro-batch may have (max_tokens_per_gpu x context parallel).
        cost: cost of a sample by its length; default the length itself.
        interleave: micro-batch counts are a multiple of this (Megatron's interleaved pipeline).
        overlong: what happens to a sample over the budget: `warn` lets it ride alone, `error` refuses it.

    Raises:
        ValueError: an argument makes no sense, or the rollouts are not steps x global_batch_size.
        ConfigError: a sample is over the budget and `overlong` is `error`.
    """
    _check_arguments(lengths, rollouts, data_parallel, global_batch_size, steps_per_rollout, token_budget, interleave)
    members: dict[int, list[int]] = {}
    for index, rollout in enumerate(rollouts):
        members.setdefault(rollout, []).append(index)
    expected = global_batch_size * steps_per_rollout
    if len(members) != expected:
        raise ValueError(
            f"{len(members)} rollouts were given, expected {steps_per_rollout} steps x {global_batch_size} = "
            f"{expected}; none may be dropped: give exactly as many, or change the batch identity"
        )
    warnings = _check_overlong(lengths, token_budget, overlong)
    costs = _costs(lengths, cost)
    groups = list(members.values())
    steps = []
    for first in range(0, expected, global_batch_size):
        samples = [index for group in groups[first : first + global_batch_size] for index in group]
        steps.append(_make_step(samples, lengths, costs, data_parallel, token_budget, interleave))
    return Schedule(tuple(steps), warnings)


def _check_arguments(
    lengths: Sequence[int],
    rollouts: Sequence[int],
    data_parallel: int,
    global_batch_size: int,
    steps_per_rollout: int,
    token_budget: int,
    interleave: int,
) -> None:
    numbers = {
        "data_parallel": data_parallel,
        "global_batch_size": global_batch_size,
        "steps_per_rollout": steps_per_rollout,
        "token_budget": token_budget,
        "interleave": interleave,
    }
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}, expected 1 or more")
    if len(lengths) != len(rollouts):
        raise ValueError(
            f"{len(lengths)} lengths and {len(rollouts)} rollout ids were given, expected one of each a sample"
        )
    if len(lengths) and min(lengths) < 1:
        raise ValueError(f"sample {list(lengths).index(min(lengths))} has {min(lengths)} tokens, expected 1 or more")


def _check_overlong(lengths: Sequence[int], token_budget: int, overlong: Literal["warn", "error"]) -> tuple[str, ...]:
    over = [length for length in lengths if length > token_budget]
    if not over:
        return ()
    what = (
        f"{len(over)} of {len(lengths)} samples have more than the {token_budget} tokens a micro-batch may have "
        f"(the longest {max(over)})"
    )
    if overlong == "error":
        raise ConfigError([Problem("trainer.max_tokens_per_gpu", f"{what}; raise it, or set trainer.overlong to warn")])
    return (f"{what}; each rides alone and may run out of memory",)


def _costs(lengths: Sequence[int], cost: Callable[[int], float] | None) -> list[float]:
    if cost is None:
        return [float(length) for length in lengths]
    by_length = {length: float(cost(length)) for length in set(lengths)}
    return [by_length[length] for length in lengths]


def _make_step(
    samples: list[int],
    lengths: Sequence[int],
    costs: list[float],
    data_parallel: int,
    token_budget: int,
    interleave: int,
) -> StepSchedule:
    ranks = _spread(samples, costs, data_parallel)
    packed = [_first_fit_decreasing(rank, lengths, token_budget) for rank in ranks]
    count = max(max(map(len, packed)), 1)
    count = -(-count // interleave) * interleave
    micro_batches = []
    for rank, bins in zip(ranks, packed, strict=True):
        even = _spread_within(rank, lengths, costs, count, token_budget) or bins
        ordered = sorted(even, key=lambda micro_batch: -sum(costs[i] for i in micro_batch))
        padded = [tuple(sorted(micro_batch)) for micro_batch in ordered] + [()] * (count - len(ordered))
        micro_batches.append(tuple(padded))
    return StepSchedule(tuple(micro_batches), sum(lengths[i] for i in samples))


def _spread(samples: list[int], costs: list[float], num_bins: int) -> list[list[int]]:
    """Give each sample, costliest first, to the bin with the smallest total (longest processing time first)."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, 0, position) for position in range(num_bins)]
    for index in sorted(samples, key=lambda i: -costs[i]):
        total, size, position = heap[0]
        bins[position].append(index)
        heapq.heapreplace(heap, (total + costs[index], size + 1, position))
    return bins


def _first_fit_decreasing(samples: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Pack samples into as few bins of `budget` tokens as first-fit decreasing finds, in O(n log n).

    A tree over the bins holds the room of the roomiest bin below each node. An overlong sample fills a bin.
    """
    size = 1
    while size < len(samples):
        size *= 2
    room = [budget] * (2 * size)
    bins: list[list[int]] = []
    for index in sorted(samples, key=lambda i: -lengths[i]):
        need = min(lengths[index], budget)
        node = 1
        while node < size:
            node = 2 * node if room[2 * node] >= need else 2 * node + 1
        if node - size == len(bins):
            bins.append([])
        bins[node - size].append(index)
        room[node] -= need
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return bins


def _spread_within(
    samples: list[int], lengths: Sequence[int], costs: list[float], num_bins: int, budget: int
) -> list[list[int]] | None:
    """Spread samples over the bins evenly by cost, within the token budget; None where this greedy finds no way."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = [budget] * num_bins
    heap = [(0.0, position) for position in range(num_bins)]
    for index in sorted(samples, key=lambda i: -costs[i]):
        need = min(lengths[index], budget)
        full = []
        while heap and room[heap[0][1]] < need:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        total, position = heap[0]
        bins[position].append(index)
        room[position] -= need
        heapq.heapreplace(heap, (total + costs[index], position))
        for entry in full:
            heapq.heappush(heap, entry)
    return bins
