"""Runs an algorithm's losses over small batches in every way a trainer may: whole, split, shuffled, on two ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from milepost.components import Algorithm, HasValueLoss
from milepost.config.schema import AlgorithmSection
from milepost.testing.context_parallel import WORLD, run_pair, zigzag
from milepost.training.inputs import Metric, PolicyInputs, SampleIndex, TokenLoss, ValueInputs
from milepost.training.losses import MetricSums, policy_objective, value_objective

SETTINGS = AlgorithmSection(name="under_check")
VALUE_CLIP = 0.2
Columns = dict[str, Tensor]
"""One sample: its per-token columns, `mask` and `weights` among them."""


class Objective(Protocol):
    """One of an algorithm's losses."""

    leaf: str
    """The column gradients are taken of."""

    def token_loss(self, columns: Columns, index: SampleIndex) -> TokenLoss:
        """What the algorithm itself returns, without the kernel."""
        ...

    def objective(self, columns: Columns, index: SampleIndex) -> tuple[Tensor, dict[str, Metric]]:
        """What the kernel makes of it."""
        ...


class PolicyObjective:
    """An algorithm's policy loss."""

    leaf = "log_probs"

    def __init__(self, algorithm: Algorithm) -> None:
        self.algorithm = algorithm

    def token_loss(self, columns: Columns, index: SampleIndex) -> TokenLoss:
        """Call `policy_loss` directly."""
        return self.algorithm.policy_loss(self._inputs(columns, index))

    def objective(self, columns: Columns, index: SampleIndex) -> tuple[Tensor, dict[str, Metric]]:
        """Call it through the kernel."""
        return policy_objective(self.algorithm, self._inputs(columns, index), columns["weights"], SETTINGS)

    def _inputs(self, columns: Columns, index: SampleIndex) -> PolicyInputs:
        own = {name: column for name, column in columns.items() if name not in ("mask", "weights")}
        return PolicyInputs(index=index, **own)


class ValueObjective:
    """An algorithm's own critic loss."""

    leaf = "values"

    def __init__(self, algorithm: HasValueLoss) -> None:
        self.algorithm = algorithm

    def token_loss(self, columns: Columns, index: SampleIndex) -> TokenLoss:
        """Call `value_loss` directly."""
        return self.algorithm.value_loss(self._inputs(columns, index))

    def objective(self, columns: Columns, index: SampleIndex) -> tuple[Tensor, dict[str, Metric]]:
        """Call it through the kernel."""
        return value_objective(self.algorithm, self._inputs(columns, index), columns["weights"])

    def _inputs(self, columns: Columns, index: SampleIndex) -> ValueInputs:
        return ValueInputs(columns["values"], columns["old_values"], columns["returns"], VALUE_CLIP, index)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a batch. The tensors hold its trainable tokens, sample after sample in the batch's order."""

    losses: Tensor
    """Weighted loss of each token."""
    gradient: Tensor
    """Of the whole loss by the leaf column."""
    metrics: Mapping[str, float]


def run(objective: Objective, samples: Sequence[Columns], micro_batches: Sequence[Sequence[int]]) -> Outcome:
    """Run the batch in these micro-batches, each a list of sample positions."""
    leaves = _leaves(objective, samples)
    losses: dict[int, Tensor] = {}
    sums = MetricSums()
    for positions in micro_batches:
        columns, index = _flatten([samples[i] | {objective.leaf: leaves[i]} for i in positions])
        loss, metrics = objective.objective(columns, index)
        loss.backward()  # type: ignore[no-untyped-call]
        sums.add(metrics, index)
        parts = torch.split(metrics["loss"].values, [len(samples[i]["mask"]) for i in positions])
        losses.update(zip(positions, parts, strict=True))
    return _outcome(samples, leaves, [losses[i] for i in range(len(samples))], sums)


def run_context_parallel(objective: Objective, samples: Sequence[Columns]) -> Outcome:
    """Run the batch on two ranks, each with a zig-zag half of every sample."""
    leaves = _leaves(objective, samples)
    places = [zigzag(len(sample["mask"])) for sample in samples]

    def work(rank: int, all_reduce: Callable[[Tensor], Tensor]) -> tuple[Tensor, MetricSums, Sequence[Tensor]]:
        halves = [
            {name: column[place[rank]] for name, column in (sample | {objective.leaf: leaf}).items()}
            for sample, leaf, place in zip(samples, leaves, places, strict=True)
        ]
        columns, index = _flatten(halves, all_reduce)
        loss, metrics = objective.objective(columns, index)
        sums = MetricSums(context_parallel=WORLD)
        sums.add(metrics, index)
        return loss, sums, torch.split(metrics["loss"].values, [len(half["mask"]) for half in halves])

    pair = run_pair(work)
    (pair[0][0] + pair[1][0]).backward()  # type: ignore[no-untyped-call]
    sums = pair[0][1]
    first, second = (part[1].state() for part in pair)
    sums.load(
        (
            first.sums + second.sums,
            torch.maximum(first.maxes, second.maxes),
            torch.minimum(first.mins, second.mins),
        )
    )
    losses = []
    for i, place in enumerate(places):
        whole = torch.zeros(len(samples[i]["mask"]), dtype=pair[0][2][i].dtype)
        for rank in range(WORLD):
            whole[place[rank]] = pair[rank][2][i]
        losses.append(whole)
    return _outcome(samples, leaves, losses, sums)


def run_directly(objective: Objective, samples: Sequence[Columns]) -> tuple[Tensor, Tensor, bool]:
    """Call the loss without the kernel.

    Returns losses and gradient of the trainable tokens, and whether the inputs are still what they were.
    """
    leaves = _leaves(objective, samples)
    columns, index = _flatten([sample | {objective.leaf: leaf} for sample, leaf in zip(samples, leaves, strict=True)])
    before = {name: column.detach().clone() for name, column in columns.items()}
    values = objective.token_loss(columns, index).values
    (torch.where(index.mask, values, values.new_zeros(())) * columns["weights"]).sum().backward()  # type: ignore[no-untyped-call]
    untouched = all(torch.equal(column.detach(), before[name]) for name, column in columns.items())
    return values.detach()[index.mask], _gradient(leaves)[index.mask], untouched


def _leaves(objective: Objective, samples: Sequence[Columns]) -> list[Tensor]:
    return [sample[objective.leaf].clone().requires_grad_() for sample in samples]


def _flatten(
    samples: Sequence[Columns], all_reduce: Callable[[Tensor], Tensor] | None = None
) -> tuple[dict[str, Tensor], SampleIndex]:
    """Lay samples end to end."""
    columns = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    lengths = torch.tensor([len(sample["mask"]) for sample in samples])
    sample_ids = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    return columns, SampleIndex(columns["mask"], sample_ids, len(samples), all_reduce)


def _gradient(leaves: Sequence[Tensor]) -> Tensor:
    """Gradients of all leaves, end to end; zero where none arrived."""
    return torch.cat([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])


def _outcome(
    samples: Sequence[Columns], leaves: Sequence[Tensor], losses: Sequence[Tensor], sums: MetricSums
) -> Outcome:
    mask = torch.cat([sample["mask"] for sample in samples])
    return Outcome(torch.cat(list(losses))[mask], _gradient(leaves)[mask], sums.result())
