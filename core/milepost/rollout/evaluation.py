"""Evaluation on held-out sets: each with its own sampling and, if named, its own reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from milepost.functional.passk import pass_at_k
from milepost.rollout.engine import Engine, SamplingParams
from milepost.rollout.generation import EVALUATION, Generate, Scorer, all_of, generate_group
from milepost.samples import Sample, Status, Task


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One held-out set, ready to be evaluated."""

    name: str
    tasks: tuple[Task, ...]
    params: SamplingParams
    samples_per_prompt: int
    scorer: Scorer


async def evaluate_held_out(
    engine: Engine,
    held_out: HeldOut,
    *,
    generate: Generate,
    seed: int,
    position: int,
    on_task: Callable[[], object] | None = None,
) -> tuple[dict[str, float], list[Sample]]:
    """Generate and score one held-out set; `position` is its place among the run's sets.

    Every evaluation of a run draws with the same keys, so that two of them differ by the weights alone.
    """

    async def one(number: int, task: Task) -> list[Sample]:
        samples = await generate_group(
            engine,
            task,
            generate=generate,
            scorer=held_out.scorer,
            params=held_out.params,
            group=number,
            num_rollouts=held_out.samples_per_prompt,
            key=(seed, EVALUATION, position, number),
        )
        if on_task is not None:
            on_task()
        return samples

    groups = await all_of(one(number, task) for number, task in enumerate(held_out.tasks))
    return evaluation_metrics(groups, held_out.samples_per_prompt), [sample for group in groups for sample in group]


def evaluation_metrics(groups: list[list[Sample]], samples_per_prompt: int) -> dict[str, float]:
    """Summarise the scored samples of one held-out set.

    `accuracy` is the mean reward. With several samples per prompt, `pass@k` is the unbiased estimate
    (arXiv 2107.03374) for k = 1, 2, 4, ... and the number of samples; a sample passes with a reward of at least 1.
    """
    samples = [sample for group in groups for sample in group]
    metrics = {
        "accuracy": sum(sample.reward for sample in samples) / len(samples),
        "response_len": sum(sample.num_trainable for sample in samples) / len(samples),
        "truncated": sum(sample.status is Status.TRUNCATED for sample in samples) / len(samples),
    }
    if samples_per_prompt > 1:
        powers = {2**i for i in range(samples_per_prompt.bit_length())}
        for k in sorted(k for k in powers | {samples_per_prompt} if k <= samples_per_prompt):
            passes = [pass_at_k(len(group), sum(sample.reward >= 1.0 for sample in group), k) for group in groups]
            metrics[f"pass@{k}"] = sum(passes) / len(passes)
    return metrics


def evaluation_table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Return the metrics of held-out sets as a table: one line per set, columns as `evaluation_metrics` has them.

    A set lacks what is not measured on it, for example pass@k where there is one sample per prompt.
    """
    columns = list(dict.fromkeys(name for metrics in results.values() for name in metrics))
    rows = [["set", *columns]]
    for name, metrics in results.items():
        rows.append([name, *(f"{metrics[column]:.3f}" if column in metrics else "-" for column in columns)])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
    return "\n".join(lines)
