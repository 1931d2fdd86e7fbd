"""From metrics to charts: which metrics share one, what each means, and lines that are short enough to draw.

A chart is plain JSON data: `{title, metrics: [{name, meaning}], unit, axis, lines: [{label, color, dash, x, y, low,
high}]}`. Values that are not finite are null.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.report.runs import RunData
from milepost.tracking.catalogue import describe

MAX_POINTS = 1200
"""Points of a line; longer ones are thinned, keeping the lowest and the highest of each stretch."""

SECTIONS = {
    "eval": ("Evaluation", "on held-out sets, by the number of rollouts trained on"),
    "rollout": ("Rollouts", "what was generated and how it was scored"),
    "train": ("Optimizer steps", "what the policy's updates did"),
    "critic": ("Critic", "what the value network's updates did"),
    "perf": ("Speed", "where the time goes"),
}
"""First part of a metric's name to the title of its section and what it shows; others have a section of their own."""

TOGETHER = (
    ("rollout/response_len", "rollout/response_len_max"),
    ("train/ratio_max", "train/ratio_min"),
    ("critic/values", "critic/returns"),
    tuple(f"perf/memory_{p}" for p in ("generate", "sleep", "critic", "actor", "offload", "wake", "push", "serve")),
)
"""Metrics that a report of one run draws in one chart."""

TIMING = {
    "evaluate": "perf/eval_time",
    "generate": "perf/rollout_time",
    "train critic": "perf/critic_train_time",
    "train": "perf/actor_train_time",
    "save": "perf/save_time",
    "push weights": "perf/update_weights_time",
}
"""Parts of an iteration, in their order, to the metrics that hold their seconds."""
WHOLE = "perf/iteration_time"
MEMORY = "perf/memory_"
"""Metric prefix of the memory behind each phase."""
STEPS = ("train", "critic")
"""Sections counted by optimizer step."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a chart: a run, or the mean over the seeds of an experiment with their range."""

    label: str
    color: int
    """Number of its colour in the page's palette."""
    x: list[int]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    dash: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the line as plain data, thinned."""
        kept = _thinned(self.y)

        def column(values: Sequence[float] | None) -> list[float | None] | None:
            return None if values is None else [_number(values[i]) for i in kept]

        return {
            "label": self.label,
            "color": self.color,
            "dash": self.dash,
            "x": [self.x[i] for i in kept],
            "y": column(self.y),
            "low": column(self.low),
            "high": column(self.high),
        }


def sections(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return the report's sections of charts: `{key, title, about, charts, constant}`.

    Metrics that never change in any run are not drawn but listed, as `constant: [{name, value, meaning}]`.
    """
    metrics = list(dict.fromkeys(metric for run in runs for metric in run.values))
    keys = [*SECTIONS, *sorted({metric.partition("/")[0] for metric in metrics} - SECTIONS.keys())]
    found = []
    for key in keys:
        of_section = [metric for metric in metrics if metric.partition("/")[0] == key]
        constant = [metric for metric in of_section if not metric.endswith("/accuracy") and _is_constant(runs, metric)]
        charts = [
            _chart(runs, group) for group in _combined([m for m in of_section if m not in constant], len(runs) == 1)
        ]
        if charts or constant:
            title, about = SECTIONS.get(key, (key, "metrics that a plugin logs"))
            found.append(
                {
                    "key": key,
                    "title": title,
                    "about": about,
                    "charts": charts,
                    "constant": [
                        {"name": metric, "value": _constant_value(runs, metric), "meaning": _meaning(metric)}
                        for metric in constant
                    ],
                }
            )
    return found


def timing(run: RunData) -> dict[str, Any] | None:
    """Return how the iterations of a run divide into parts: `{x, parts: [{name, y}]}` in seconds.

    What is left of an iteration is `other`. None for a run without a whole iteration.
    """
    whole = run.values.get(WHOLE)
    if not whole:
        return None
    x = sorted(whole)
    parts = {
        name: [run.values[metric].get(index, 0.0) for index in x]
        for name, metric in TIMING.items()
        if metric in run.values
    }
    other = [max(0.0, whole[index] - math.fsum(part[i] for part in parts.values())) for i, index in enumerate(x)]
    parts["other"] = other
    return {"x": x, "parts": [{"name": name, "y": [_number(value) for value in y]} for name, y in parts.items()]}


def palette(runs: Sequence[RunData]) -> dict[str, int]:
    """Return a colour number for each group of runs, in the order they were given."""
    return {group: number for number, group in enumerate(dict.fromkeys(run.group for run in runs))}


def _combined(metrics: Sequence[str], single: bool) -> Iterator[list[str]]:
    """Yield the metrics of each chart."""
    left = list(metrics)
    while left:
        metric = left.pop(0)
        chart = [metric]
        if single:
            partners = [other for group in TOGETHER if metric in group for other in group]
            if _of_set(metric):
                name, kind = metric.removeprefix("eval/").rsplit("/", 1)
                # One measure on all sets; the chances of several tries on one set.
                partners = [m for m in left if _of_set(m) and m.endswith(f"/{kind}")]
                if kind.startswith("pass@"):
                    partners = [m for m in left if m.startswith(f"eval/{name}/pass@")]
            chart += [other for other in left if other in partners]
            left = [other for other in left if other not in chart]
        yield chart


def _of_set(metric: str) -> bool:
    """Whether a metric is one of a held-out set: eval/NAME/MEASURE."""
    return metric.startswith("eval/") and metric.count("/") >= 2


def _chart(runs: Sequence[RunData], metrics: Sequence[str]) -> dict[str, Any]:
    section = metrics[0].partition("/")[0]
    lines = []
    if len(runs) == 1:
        for number, metric in enumerate(metrics):
            x, y = _curve(runs[0].values[metric])
            lines.append(Line(_label(metric, metrics), number, x, y))
    else:
        colors = palette(runs)
        for group, color in colors.items():
            curves = [run.values[metrics[0]] for run in runs if run.group == group and metrics[0] in run.values]
            if len(curves) == 1:
                lines.append(Line(group, color, *_curve(curves[0])))
            elif curves:
                lines.append(_mean_line(group, color, curves))
    entry = describe(metrics[0])
    return {
        "title": metrics[0] if len(metrics) == 1 else _shared_title(metrics),
        "metrics": [{"name": metric, "meaning": _meaning(metric)} for metric in metrics],
        "unit": entry.unit if entry else "",
        "axis": "step" if section in STEPS else "rollouts trained" if section == "eval" else "rollout",
        "lines": [line.to_json() for line in lines],
    }


def _shared_title(metrics: Sequence[str]) -> str:
    if _of_set(metrics[0]):
        name, kind = metrics[0].removeprefix("eval/").rsplit("/", 1)
        return f"eval/{name}/pass@k" if kind.startswith("pass@") else f"eval/…/{kind}"
    if metrics[0].startswith(MEMORY):
        return f"{MEMORY}…"
    return " and ".join([metrics[0], *(metric.partition("/")[2] for metric in metrics[1:])])


def _label(metric: str, metrics: Sequence[str]) -> str:
    """Return what tells a metric from the others of its chart."""
    if metric.startswith(MEMORY):
        return metric.removeprefix(MEMORY)
    name = metric.partition("/")[2]
    if not _of_set(metric):
        return name
    held_out, kind = name.rsplit("/", 1)
    same_set = all(other.startswith(f"eval/{held_out}/") for other in metrics)
    return kind if same_set else held_out


def _meaning(metric: str) -> str:
    entry = describe(metric)
    if entry is None:
        return ""
    if metric.startswith(MEMORY):
        return entry.meaning.replace("NAME: ", "")
    # The catalogue's NAME is the set's, or that of a further score.
    name = metric.rsplit("/", 1)[0].partition("/")[2] if _of_set(metric) else metric.rpartition("/")[2]
    return entry.meaning.replace("NAME", name)


def _curve(values: Mapping[int, float]) -> tuple[list[int], list[float]]:
    x = sorted(values)
    return x, [values[i] for i in x]


def _mean_line(label: str, color: int, curves: Sequence[Mapping[int, float]]) -> Line:
    """Return the mean and range, at every index, of the seeds that have come to it."""
    x = sorted(set().union(*curves))
    columns = [[value for curve in curves if math.isfinite(value := curve.get(i, math.nan))] or [math.nan] for i in x]
    mean = [math.fsum(column) / len(column) for column in columns]
    return Line(label, color, x, mean, [min(column) for column in columns], [max(column) for column in columns])


def _is_constant(runs: Iterable[RunData], metric: str) -> bool:
    return len({value for run in runs for value in run.values.get(metric, {}).values()}) == 1


def _constant_value(runs: Iterable[RunData], metric: str) -> float | None:
    return next(_number(value) for run in runs for value in run.values.get(metric, {}).values())


def _thinned(y: Sequence[float]) -> list[int]:
    """Return which points to draw: all, or the ends and the lowest and highest of each stretch."""
    if len(y) <= MAX_POINTS:
        return list(range(len(y)))
    kept = {0, len(y) - 1}
    width = 2 * len(y) / MAX_POINTS
    for bucket in range(MAX_POINTS // 2):
        stretch = range(int(bucket * width), min(len(y), int((bucket + 1) * width)))
        finite = [i for i in stretch if math.isfinite(y[i])]
        if finite:
            kept |= {min(finite, key=lambda i: y[i]), max(finite, key=lambda i: y[i])}
    return sorted(kept)


def _number(value: float) -> float | None:
    """Return a number with six significant digits, None where it is not finite."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
