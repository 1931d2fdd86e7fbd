"""The promises of an algorithm, tried on a small ragged batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from milepost.components import Algorithm, AlgorithmTraits, Component, HasValueLoss
from milepost.testing.findings import Finding, Findings, find_subject
from milepost.testing.objectives import (
    Columns,
    Objective,
    Outcome,
    PolicyObjective,
    ValueObjective,
    run,
    run_context_parallel,
    run_directly,
)
from milepost.testing.tensors import garbage

MASKS = ("0011111", "0", "0110011001111", "01", "0000111101", "0111", "11111111")
"""Trainable tokens of the samples of the batch: prompts, turns of an environment, no trainable token at all."""
WHOLE = [list(range(len(MASKS)))]


def check_algorithm(
    algorithm: str | Component[Algorithm] | Algorithm,
    options: Mapping[str, Any] | None = None,
    *,
    policy_gradient: bool | None = None,
    seed: int = 0,
) -> list[Finding]:
    """Try every promise of an algorithm and return those that were not kept.

    - It returns one loss per token, differentiable, and unreduced metrics.
    - Loss, gradient and metrics do not depend on how samples are split into micro-batches, in what order they are
      packed, or on a context-parallel split of two (simulated, zig-zag, with sums that really go over both halves).
    - What stands at masked tokens (NaN and infinity included), and how many of them there are, changes nothing.
    - The same inputs give the same numbers, and stay as they were.
    - Log-probs that lie far apart give a finite loss and gradient.
    - On policy, the gradient is that of -A logp and metrics named `ratio...` are exactly 1; with zero advantages the
      gradient is exactly zero.
    - A `value_loss` of its own keeps the promises that do not speak of the policy.
    - Options survive pickling.

    Args:
        algorithm: registered name, component, or a built algorithm.
        options: of the component.
        policy_gradient: whether the objective is a policy gradient and nothing else, so that the on-policy and
            zero-advantage promises apply; default yes unless the traits ask for a teacher.
        seed: of the batch's numbers.

    Returns:
        Findings; empty where all promises are kept.

    Raises:
        PluginError: there is no such component, or it cannot be built.
        ValueError: options were given beside a built algorithm.
    """
    subject = find_subject("algorithm", algorithm, options)
    traits = subject.traits if isinstance(subject.traits, AlgorithmTraits) else AlgorithmTraits()
    findings = Findings()
    findings.check_options(subject)
    policy = PolicyObjective(subject.built)
    samples = _policy_samples(traits, seed)
    if _check_common(findings, policy, samples, "policy_loss"):
        _check_far_apart(findings, policy, samples)
        if policy_gradient if policy_gradient is not None else not traits.teacher:
            _check_on_policy(findings, policy, samples)
            _check_zero_advantages(findings, policy, samples)
    if isinstance(subject.built, HasValueLoss):
        _check_common(findings, ValueObjective(subject.built), _value_samples(seed), "value_loss")
    return list(findings)


def _check_common(findings: Findings, objective: Objective, samples: Sequence[Columns], what: str) -> bool:
    """Check the promises that any loss keeps; False if it could not even be run."""
    before = len(findings)
    case = f"{what} of {len(samples)} samples"
    with findings.surviving("one loss per token and unreduced metrics", case):
        base = run(objective, samples, WHOLE)
        reached = bool(base.gradient.any())
        findings.require(reached, "differentiable", case, f"a gradient of {objective.leaf}", "none, or zero everywhere")
        finite = bool(base.losses.isfinite().all() and base.gradient.isfinite().all())
        findings.require(finite, "finite", case, "finite losses and gradient", "NaN or infinity")
    if len(findings) > before:
        return False
    _check_split(findings, objective, samples, base, what)
    _check_masked(findings, objective, samples, base, what)
    _check_purity(findings, objective, samples, base, what)
    return True


def _compare(findings: Findings, promise: str, case: str, expected: Outcome, got: Outcome) -> None:
    findings.compare(promise, case, "loss", expected.losses, got.losses)
    findings.compare(promise, case, "gradient", expected.gradient, got.gradient)
    findings.compare_metrics(promise, case, expected.metrics, got.metrics)


def _check_split(
    findings: Findings, objective: Objective, samples: Sequence[Columns], base: Outcome, what: str
) -> None:
    count = len(samples)
    splits: dict[str, tuple[str, Callable[[], Outcome]]] = {
        "each sample in a micro-batch of its own": (
            "split invariance",
            lambda: run(objective, samples, [[i] for i in range(count)]),
        ),
        "two micro-batches": (
            "split invariance",
            lambda: run(objective, samples, [list(range(0, count, 2)), list(range(1, count, 2))]),
        ),
        "samples packed in reverse": (
            "packing order",
            lambda: run(objective, samples, [list(reversed(range(count)))]),
        ),
        "two ranks with a zig-zag half of each sample": (
            "context-parallel invariance",
            lambda: run_context_parallel(objective, samples),
        ),
    }
    for how, (promise, split) in splits.items():
        with findings.surviving(promise, f"{what}, {how}"):
            _compare(findings, promise, f"{what}, {how}", base, split())


def _check_masked(
    findings: Findings, objective: Objective, samples: Sequence[Columns], base: Outcome, what: str
) -> None:
    for number in (float("nan"), float("inf"), -float("inf")):
        case = f"{what}, {number} at masked tokens"
        with findings.surviving("masking", case):
            _compare(findings, "masking", case, base, run(objective, _fill_masked(samples, number), WHOLE))
    with findings.surviving("masking", f"{what} without the kernel"):
        clean, dirty = (run_directly(objective, _fill_masked(samples, number)) for number in (0.0, -7.0))
        case = f"{what} without the kernel, -7 instead of 0 at masked tokens"
        findings.compare("masking", case, "loss", clean[0], dirty[0])
        findings.compare("masking", case, "gradient", clean[1], dirty[1])
    case = f"{what}, three masked tokens more in front and five behind"
    with findings.surviving("padding", case):
        padded = [
            {name: torch.nn.functional.pad(column, (3, 5)) for name, column in sample.items()} for sample in samples
        ]
        _compare(findings, "padding", case, base, run(objective, padded, WHOLE))


def _check_purity(
    findings: Findings, objective: Objective, samples: Sequence[Columns], base: Outcome, what: str
) -> None:
    with findings.surviving("pure", what):
        again = run(objective, samples, WHOLE)
        same = torch.equal(base.losses, again.losses) and torch.equal(base.gradient, again.gradient)
        findings.require(same, "pure", f"{what}, called twice", "the same numbers", "others")
        *_, untouched = run_directly(objective, samples)
        findings.require(untouched, "pure", what, "inputs as they were", "inputs changed in place")


def _check_far_apart(findings: Findings, policy: Objective, samples: Sequence[Columns]) -> None:
    for distance in (1000.0, -1000.0):
        case = f"old log-probs {distance:+g} from the new ones"
        with findings.surviving("finite", case):
            far = [sample | {"old_log_probs": sample["log_probs"] + distance} for sample in samples]
            outcome = run(policy, far, WHOLE)
            finite = bool(outcome.losses.isfinite().all() and outcome.gradient.isfinite().all())
            findings.require(finite, "finite", case, "finite losses and gradient", "NaN or infinity")


def _check_on_policy(findings: Findings, policy: Objective, samples: Sequence[Columns]) -> None:
    promise, case = "ratio 1 on policy", "old log-probs equal to the new ones, one advantage per sample"
    with findings.surviving(promise, case):
        on_policy = [
            sample
            | {
                "old_log_probs": sample["log_probs"],
                "engine_log_probs": sample["log_probs"],
                "advantages": torch.full_like(sample["advantages"], advantage),
            }
            for sample, advantage in zip(samples, torch.linspace(-1.5, 2.0, len(samples)).tolist(), strict=True)
        ]
        outcome = run(policy, on_policy, WHOLE)
        expected = torch.cat([-(s["weights"] * s["advantages"])[s["mask"]] for s in on_policy])
        findings.compare(promise, case, "gradient (that of -A logp)", expected, outcome.gradient)
        for name, number in outcome.metrics.items():
            if name.startswith("ratio"):
                findings.require(number == 1.0, promise, case, f"metric {name!r} exactly 1", number)


def _check_zero_advantages(findings: Findings, policy: Objective, samples: Sequence[Columns]) -> None:
    promise, case = "no gradient from zero advantages", "a batch of zero-variance groups"
    with findings.surviving(promise, case):
        outcome = run(policy, [s | {"advantages": torch.zeros_like(s["advantages"])} for s in samples], WHOLE)
        largest = float(outcome.gradient.abs().max())
        findings.require(largest == 0.0, promise, case, "a gradient of exactly 0", f"{largest:.3g}")


def _fill_masked(samples: Sequence[Columns], number: float) -> list[Columns]:
    return [
        {name: column if name == "mask" else garbage(column, sample["mask"], number) for name, column in sample.items()}
        for sample in samples
    ]


def _masks() -> list[Tensor]:
    return [torch.tensor([flag == "1" for flag in mask]) for mask in MASKS]


def _weights(mask: Tensor) -> Tensor:
    return mask / (mask.sum().clamp(min=1) * len(MASKS))


def _policy_samples(traits: AlgorithmTraits, seed: int) -> list[Columns]:
    """Samples some way off policy, so that every branch of a clip is taken."""
    generator = torch.Generator().manual_seed(seed)
    samples: list[Columns] = []
    for mask in _masks():

        def noise(scale: float, size: int = len(mask)) -> Tensor:
            return scale * torch.randn(size, generator=generator)

        log_probs = -0.05 - noise(1.5).abs()
        old_log_probs = log_probs + noise(0.4)
        columns = {
            "mask": mask,
            "weights": _weights(mask),
            "log_probs": log_probs,
            "old_log_probs": old_log_probs,
            "advantages": noise(1.0),
            "engine_log_probs": old_log_probs + noise(0.02),
        }
        if traits.reference:
            columns["ref_log_probs"] = log_probs + noise(0.3)
        if traits.teacher:
            columns["teacher_log_probs"] = log_probs + noise(0.3)
        samples.append(columns)
    return samples


def _value_samples(seed: int) -> list[Columns]:
    generator = torch.Generator().manual_seed(seed)
    samples: list[Columns] = []
    for mask in _masks():
        values, moved, returns = torch.randn(3, len(mask), generator=generator)
        columns = {"values": values, "old_values": values + 0.3 * moved, "returns": returns}
        samples.append({"mask": mask, "weights": _weights(mask), **columns})
    return samples
