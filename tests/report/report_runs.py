"""Run folders written by hand for the tests of reports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

Line = dict[str, Any]


def line(kind: str, index: int, **metrics: float | str) -> Line:
    """A line of metrics.jsonl; `rollout__raw_reward` is `rollout/raw_reward`."""
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {"kind": kind, "index": index, "rollout": index, **named, "time": 1000.0 + index}


def write_run(
    folder: Path,
    lines: list[Line],
    *,
    samples: list[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
    finished: bool = True,
) -> Path:
    """Write what a training run leaves behind."""
    folder.mkdir(parents=True)
    write_lines(folder / "metrics.jsonl", lines)
    write_lines(folder / "samples.jsonl", samples or [])
    settings = config or {"run": {"seed": 0, "dir": str(folder)}, "rollout": {"num_rollouts": 2}}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    if finished:
        (folder / "summary.json").write_text("{}")
    return folder


def write_lines(path: Path, lines: list[Line]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def small_run(folder: Path, *, seed: int = 0, shift: float = 0.0, **settings: Any) -> Path:
    """Two rollouts with an evaluation before and after; `shift` is added to accuracies and rewards."""
    lines = [
        line("eval", 0, eval__toy__accuracy=0.25 + shift),
        line("perf", 0, perf__rollout_time=1.0, perf__tokens_per_gpu_per_second=100.0),
        line("rollout", 0, rollout__raw_reward=0.2 + shift, rollout__truncated=0.0),
        line("step", 0, train__loss=0.5, train__ratio_max=1.0, train__ratio_min=1.0),
        line("perf", 0, perf__actor_train_time=2.0, perf__iteration_time=4.0),
        line("perf", 1, perf__rollout_time=1.5, perf__tokens_per_gpu_per_second=300.0),
        line("rollout", 1, rollout__raw_reward=0.4 + shift, rollout__truncated=0.0),
        line("step", 1, train__loss="NaN", train__ratio_max=1.5, train__ratio_min=0.5),
        line("perf", 1, perf__actor_train_time=2.5, perf__iteration_time=5.0),
        line("eval", 2, eval__toy__accuracy=0.75 + shift),
    ]
    config = {"run": {"seed": seed, "dir": str(folder)}, "rollout": {"num_rollouts": 2}, "optimizer": {"lr": 0.1}}
    return write_run(folder, lines, config={**config, **settings})
