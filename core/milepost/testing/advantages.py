"""The promises of an advantage estimator, tried on a small ragged rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from milepost.components import AdvantageEstimator, AdvantageTraits, Component
from milepost.testing.findings import Finding, Findings, find_subject
from milepost.testing.tensors import garbage
from milepost.training.inputs import ADVANTAGE_INPUTS, AdvantageBatch, Estimate

NAN = float("nan")
TOKEN_INPUTS: tuple[str, ...] = tuple(name for name in ADVANTAGE_INPUTS if name != "rewards")


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One sample of the rollout under check."""

    mask: Tensor
    """[n] bool."""
    columns: Mapping[str, Tensor]
    """Every per-token input there is, each [n]."""
    reward: float
    group: int
    rollout: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Trainable tokens of each sample, in the order of the samples."""

    advantages: tuple[Tensor, ...]
    returns: tuple[Tensor, ...] | None


SAMPLES = (
    # (trainable tokens, reward, group, rollout): a group of three rollouts one of which has two sequences, one of
    # equal rewards, a group of one, and one with a sample that has no trainable token.
    ("0011111", 1.0, 4, 10),
    ("00110111", 0.0, 4, 11),
    ("011", 1.0, 4, 12),
    ("00111", 1.0, 4, 12),
    ("01111", 0.5, 2, 13),
    ("0101", 0.5, 2, 14),
    ("0111", -2.0, 9, 15),
    ("0011", 3.0, 7, 16),
    ("000", 1.5, 7, 17),
)


def check_advantage(
    estimator: str | Component[AdvantageEstimator] | AdvantageEstimator,
    options: Mapping[str, Any] | None = None,
    *,
    traits: AdvantageTraits | None = None,
    seed: int = 0,
) -> list[Finding]:
    """Try every promise of an advantage estimator and return those that were not kept.

    - It gives [N] float32 advantages (and returns, if and only if its traits say so), finite, zero where masked.
    - It reads only the inputs it declared.
    - The order of samples and the numbers that name groups and rollouts change nothing.
    - What stands at masked tokens (NaN included), and how many of them there are, changes nothing; nor does a sample
      without a trainable token, be it in a group of its own or another sequence of a rollout.
    - Groups of one and groups of equal rewards give finite advantages; zero from an estimator that compares the
      rewards of a group and reads nothing else.
    - The same inputs give the same numbers, and stay as they were.
    - Options survive pickling.

    Args:
        estimator: registered name, component, or a built estimator.
        options: of the component.
        traits: of a built estimator; taken from the component otherwise.
        seed: of the rollout's numbers.

    Returns:
        Findings; empty where all promises are kept.

    Raises:
        PluginError: there is no such component, or it cannot be built.
        ValueError: options were given beside a built estimator.
    """
    subject = find_subject("advantage", estimator, options)
    known = subject.traits if isinstance(subject.traits, AdvantageTraits) else traits or AdvantageTraits()
    if subject.options is not None:
        known = replace(known, inputs=known.reads(subject.options), more_inputs=None)
    findings = Findings()
    findings.check_options(subject)
    _Check(findings, subject.built, known, _samples(seed)).run()
    return list(findings)


@dataclass(frozen=True, slots=True)
class _Check:
    """One estimator on its rollout."""

    findings: Findings
    estimator: AdvantageEstimator
    traits: AdvantageTraits
    samples: Sequence[RolloutSample]

    def run(self) -> None:
        before = len(self.findings)
        with self.findings.surviving("declared inputs", f"a rollout that has {', '.join(sorted(self.traits.inputs))}"):
            base = self._estimate(self.samples)
        if len(self.findings) > before:
            return
        self._check_changes(base)
        self._check_degenerate()
        self._check_purity(base)

    def _batch(self, samples: Sequence[RolloutSample]) -> AdvantageBatch:
        inputs: dict[str, Tensor] = {}
        for name in self.traits.inputs:
            if name == "rewards":
                inputs[name] = torch.tensor([sample.reward for sample in samples])
            else:
                inputs[name] = torch.cat([sample.columns[name] for sample in samples])
        return AdvantageBatch(
            lengths=torch.tensor([len(sample.mask) for sample in samples]),
            mask=torch.cat([sample.mask for sample in samples]),
            groups=torch.tensor([sample.group for sample in samples]),
            rollouts=torch.tensor([sample.rollout for sample in samples]),
            inputs=inputs,
        )

    def _estimate(self, samples: Sequence[RolloutSample]) -> Outcome:
        batch = self._batch(samples)
        estimate = self.estimator.estimate(batch)
        self._check_form(estimate, batch.mask)
        lengths = batch.lengths.tolist()

        def split(column: Tensor) -> tuple[Tensor, ...]:
            parts = torch.split(column, lengths)
            return tuple(part[sample.mask] for part, sample in zip(parts, samples, strict=True))

        returns = None if estimate.returns is None else split(estimate.returns)
        return Outcome(split(estimate.advantages), returns)

    def _check_form(self, estimate: Estimate, mask: Tensor) -> None:
        """Raise ValueError if an estimate has not the promised form, for then it cannot be compared either."""
        if (estimate.returns is not None) != self.traits.returns:
            what = "no returns" if estimate.returns is None else "returns"
            raise ValueError(f"the estimate has {what}, but the traits say returns={self.traits.returns}")
        for name, column in (("advantages", estimate.advantages), ("returns", estimate.returns)):
            if column is None:
                continue
            if column.shape != mask.shape or column.dtype != torch.float32:
                raise ValueError(
                    f"{name} are {tuple(column.shape)} {column.dtype}, expected {tuple(mask.shape)} torch.float32"
                )
            if not bool(column.isfinite().all()):
                raise ValueError(f"{name} hold NaN or infinity")
            if bool(column[~mask].any()):
                raise ValueError(f"{name} are not zero where masked")

    def _check_changes(self, base: Outcome) -> None:
        """Check the changes to a rollout that must not change what its samples get."""
        samples, order = self.samples, [5, 2, 8, 0, 7, 3, 1, 6, 4]
        self._compare("order", "samples shuffled", base, [samples[i] for i in order], order)
        same = list(range(len(samples)))
        renamed = [
            replace(sample, group=1000 - 7 * sample.group, rollout=3 * (40 - sample.rollout)) for sample in samples
        ]
        self._compare("names", "group and rollout ids renamed", base, renamed, same)
        for number in (NAN, float("inf")):
            dirty = [
                replace(sample, columns={n: garbage(c, sample.mask, number) for n, c in sample.columns.items()})
                for sample in samples
            ]
            self._compare("masking", f"{number} at masked tokens", base, dirty, same)
        padded = [_pad(sample, 3, 5) for sample in samples]
        self._compare("padding", "three masked tokens more in front and five behind", base, padded, same)
        empty = _sample("000", 5.0, 3, 18, seed=1)
        self._compare("empty sample", "a group of one without a trainable token", base, [empty, *samples], [-1, *same])
        sequence = _sample("000", samples[0].reward, samples[0].group, samples[0].rollout, seed=2)
        case = "one more sequence of the first rollout, without a trainable token"
        self._compare("rollouts count once", case, base, [*samples, sequence], [*same, -1])

    def _compare(
        self, promise: str, case: str, base: Outcome, samples: Sequence[RolloutSample], origin: Sequence[int]
    ) -> None:
        """Compare with the base what each sample got; `origin` is its position there, -1 for one that is new."""
        with self.findings.surviving(promise, case):
            outcome = self._estimate(samples)
            for name, before, after in (
                ("advantages", base.advantages, outcome.advantages),
                ("returns", base.returns, outcome.returns),
            ):
                if before is None or after is None:
                    continue
                known = [(i, column) for i, column in zip(origin, after, strict=True) if i >= 0]
                expected = torch.cat([before[i] for i, _ in known])
                self.findings.compare(promise, case, name, expected, torch.cat([column for _, column in known]))

    def _check_degenerate(self) -> None:
        """Check groups that have nothing to compare."""
        compares_rewards = self.traits.group and self.traits.inputs == {"rewards"}
        equal = [replace(sample, reward=0.1) for sample in self.samples]
        for promise, case, samples in (
            ("zero variance", "every reward 0.1", equal),
            ("group of one", "a rollout of one sample", self.samples[:1]),
        ):
            with self.findings.surviving(promise, case):
                advantages = torch.cat(self._estimate(samples).advantages)
                if compares_rewards:
                    largest = float(advantages.abs().max())
                    self.findings.require(largest == 0.0, promise, case, "advantages of exactly 0", f"{largest:.3g}")

    def _check_purity(self, base: Outcome) -> None:
        with self.findings.surviving("pure", "called twice"):
            again = self._estimate(self.samples)
            same = all(torch.equal(a, b) for a, b in zip(base.advantages, again.advantages, strict=True))
            self.findings.require(same, "pure", "called twice", "the same numbers", "others")
            batch, before = self._batch(self.samples), self._batch(self.samples)
            self.estimator.estimate(batch)
            changed = [name for name, column in vars(before).items() if not torch.equal(column, getattr(batch, name))]
            self.findings.require(not changed, "pure", "inputs", "inputs as they were", f"{changed} changed in place")


def _sample(mask: str, reward: float, group: int, rollout: int, seed: int) -> RolloutSample:
    generator = torch.Generator().manual_seed(seed)
    columns = {
        name: torch.randn(len(mask), generator=generator) - (1.0 if "log" in name else 0.0) for name in TOKEN_INPUTS
    }
    return RolloutSample(torch.tensor([flag == "1" for flag in mask]), columns, reward, group, rollout)


def _samples(seed: int) -> list[RolloutSample]:
    return [_sample(*given, seed=1000 * seed + position) for position, given in enumerate(SAMPLES)]


def _pad(sample: RolloutSample, front: int, behind: int) -> RolloutSample:
    pad = torch.nn.functional.pad
    return replace(
        sample,
        mask=pad(sample.mask, (front, behind)),
        columns={name: pad(column, (front, behind), value=7.0) for name, column in sample.columns.items()},
    )
