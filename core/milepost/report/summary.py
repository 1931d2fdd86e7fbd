"""Runs in figures: what came out, how long it took, and how seeds of one experiment spread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from milepost.report.runs import RunData

LAST = 10
"""Rollouts that the final reward is averaged over."""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Accuracy on one held-out set."""

    before: float
    """At the first evaluation."""
    after: float
    """At the last one."""
    best: float
    best_at: int
    """Rollouts trained on at the best evaluation."""
    num_evaluations: int


@dataclass(frozen=True, slots=True)
class Spread:
    """One figure over the seeds of an experiment."""

    mean: float
    low: float
    high: float
    count: int


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in figures; None where the run has not come to it."""

    name: str
    folder: str
    group: str
    seed: int | None
    finished: bool
    num_rollouts: int
    """Rollouts trained on."""
    planned_rollouts: int | None
    num_steps: int
    """Optimizer steps of the policy."""
    seconds: float
    """Time spent in iterations, over all resumes."""
    evaluations: dict[str, Evaluated]
    reward_first: float | None
    """Mean reward of the first rollout."""
    reward_last: float | None
    """Mean reward of the last `LAST` rollouts."""
    tokens_per_gpu_per_second: float | None
    """Mean over rollouts."""
    num_alarms: int


def summarise_run(run: RunData) -> Summary:
    """Put one run in figures."""
    rewards = _finite(run.values.get("rollout/raw_reward", {}).values())
    rates = _finite(run.values.get("perf/tokens_per_gpu_per_second", {}).values())
    trained = run.values.get("perf/iteration_time", {})
    planned = run.config.get("rollout.num_rollouts")
    seed = run.seed
    return Summary(
        name=run.name,
        folder=str(run.folder),
        group=run.group,
        seed=seed if isinstance(seed, int) else None,
        finished=run.finished,
        num_rollouts=len(trained),
        planned_rollouts=planned if isinstance(planned, int) else None,
        num_steps=len(run.values.get("train/loss", {})),
        seconds=sum(_finite(trained.values())),
        evaluations=_evaluations(run),
        reward_first=rewards[0] if rewards else None,
        reward_last=_mean(rewards[-LAST:]) if rewards else None,
        tokens_per_gpu_per_second=_mean(rates) if rates else None,
        num_alarms=len(run.alarms),
    )


def summarise(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return the figures of runs, and of each experiment with several seeds, as plain JSON data."""
    summaries = [summarise_run(run) for run in runs]
    groups = []
    for name in dict.fromkeys(summary.group for summary in summaries):
        members = [summary for summary in summaries if summary.group == name]
        groups.append(
            {
                "name": name,
                "runs": [summary.name for summary in members],
                "figures": {key: asdict(spread) for key, spread in group_figures(members).items()},
            }
        )
    return {"runs": [asdict(summary) for summary in summaries], "groups": groups}


def group_figures(members: Sequence[Summary]) -> dict[str, Spread]:
    """Return mean and range over the runs of one experiment: accuracy after training by set, reward, time."""
    figures: dict[str, Spread | None] = {}
    for name in dict.fromkeys(name for summary in members for name in summary.evaluations):
        found = [summary.evaluations[name] for summary in members if name in summary.evaluations]
        figures[f"eval/{name}/before"] = _spread(one.before for one in found)
        figures[f"eval/{name}/after"] = _spread(one.after for one in found)
        figures[f"eval/{name}/best"] = _spread(one.best for one in found)
    figures["reward_last"] = _spread(s.reward_last for s in members)
    figures["num_rollouts"] = _spread(float(s.num_rollouts) for s in members)
    figures["seconds"] = _spread(s.seconds for s in members)
    figures["tokens_per_gpu_per_second"] = _spread(s.tokens_per_gpu_per_second for s in members)
    return {key: spread for key, spread in figures.items() if spread is not None}


def _evaluations(run: RunData) -> dict[str, Evaluated]:
    found = {}
    for metric, values in run.values.items():
        if metric.startswith("eval/") and metric.endswith("/accuracy"):
            points = sorted(values.items())
            # Of equal ones the first: what it took to get there.
            best_at, best = max(points, key=lambda point: (point[1], -point[0]))
            name = metric.removeprefix("eval/").removesuffix("/accuracy")
            found[name] = Evaluated(points[0][1], points[-1][1], best, best_at, len(points))
    return found


def _finite(values: Iterable[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    return Spread(_mean(known), min(known), max(known), len(known)) if known else None
