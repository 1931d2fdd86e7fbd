"""Reading run folders, finished or still running, for a report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from milepost.checkpoint import STATE, CheckpointStore, read_state
from milepost.config.documents import leaves
from milepost.errors import DataError
from milepost.provenance import read_provenance
from milepost.tracking.records import Record, read_lines, read_records

_SEED = re.compile(r"(?P<stem>.*?[^\W_].*?)[-_.]?(?P<word>seed|s)?[-_.=]?(?P<number>\d+)", re.IGNORECASE)
_NOT_COMPARED = ("run.seed", "run.dir", "run.threads", "run.device", "track.", "plugins.")
"""Settings in which runs of one experiment may differ."""
_PATHS = re.compile(r"(^|\.)(path(\.\d+)?(\.path)?|init_from|converted)$")


@dataclass(slots=True)
class RunData:
    """What a run folder holds."""

    folder: Path
    name: str
    """Last part of the folder's path, or more of it where that is needed to tell runs apart."""
    config: dict[str, Any]
    """Dotted path to value, of the resolved run config."""
    origins: Mapping[str, str]
    """Dotted path to where the value came from; empty for a run that did not record it."""
    plugins: Mapping[str, str]
    """Distributions of plugins and their versions."""
    records: list[Record]
    samples: list[dict[str, Any]]
    alarms: list[dict[str, Any]]
    finished: bool
    group: str = ""
    """Runs of one experiment, which differ by their seed, share a group."""
    values: dict[str, dict[int, float]] = field(default_factory=dict)
    """Metric to its value by index: the optimizer step for metrics of steps, else the rollout."""
    rollout_of: dict[str, dict[int, int]] = field(default_factory=dict)
    """Metric to the rollout of each index."""

    @property
    def seed(self) -> Any:
        """The run's seed."""
        return self.config.get("run.seed")


def read_runs(folders: Sequence[Path]) -> list[RunData]:
    """Read run folders and find out which of them are seeds of one experiment.

    Raises DataError for a folder that is no run's, or whose metrics are broken.
    """
    names = _short_names([folder.absolute() for folder in folders])
    runs = [read_run(folder.absolute(), name) for folder, name in zip(folders, names, strict=True)]
    _group(runs)
    return runs


def read_run(folder: Path, name: str) -> RunData:
    """Read one run folder. Raises DataError if it is none, or a file of it is broken."""
    if not (folder / "metrics.jsonl").is_file():
        state = "has no metrics.jsonl" if folder.is_dir() else "is no folder"
        raise DataError(f"{folder} {state}; expected the run folder of a training run")
    file = folder / "config.yaml"
    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except yaml.YAMLError as error:
        raise DataError(f"{file} is no YAML: {error}") from error
    provenance = read_provenance(folder)
    run = RunData(
        folder=folder,
        name=name,
        config=dict(leaves(config or {})),
        origins=provenance.origins,
        plugins=provenance.plugins or _checkpointed_plugins(folder),
        records=list(read_records(folder / "metrics.jsonl")),
        samples=list(read_lines(folder / "samples.jsonl")),
        alarms=list(read_lines(folder / "alarms.jsonl")),
        finished=(folder / "summary.json").is_file(),
        group=name,
    )
    for record in run.records:
        for metric, value in record.metrics.items():
            if isinstance(value, int | float):
                run.values.setdefault(metric, {})[record.index] = float(value)
                run.rollout_of.setdefault(metric, {})[record.index] = record.rollout
    return run


def _checkpointed_plugins(folder: Path) -> Mapping[str, str]:
    """Return the plugins that the last checkpoint recorded; a run without any has none."""
    latest = CheckpointStore(folder, keep=1).latest()
    if latest is None or not (latest / STATE).is_file():
        return {}
    plugins = read_state(latest).get("plugins")
    return {str(name): str(version) for name, version in plugins.items()} if isinstance(plugins, dict) else {}


def _short_names(folders: Sequence[Path]) -> list[str]:
    """Return the shortest ends of the paths that tell them all apart."""
    for depth in range(1, max(len(folder.parts) for folder in folders) + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(set(folders)):
            break
    return names


def _group(runs: Iterable[RunData]) -> None:
    """Give runs that differ by nothing but their seed one group, called after what their names share.

    A name that says so (`ppo-seed3`) may bring data and a model of its own; where it ends in a bare number, everything
    but the seed has to be the same.
    """
    groups: dict[tuple[str, str], list[RunData]] = {}
    for run in runs:
        match = _SEED.fullmatch(run.name)
        stem = match["stem"] if match else run.name
        settings = {
            path: value
            for path, value in run.config.items()
            if not path.startswith(_NOT_COMPARED) and not (match and match["word"] and _PATHS.search(path))
        }
        groups.setdefault((stem, json.dumps(settings, sort_keys=True, default=str)), []).append(run)
    stems = [stem for (stem, _), members in groups.items() if len(members) > 1]
    for (stem, _), members in groups.items():
        if len({run.seed for run in members}) == len(members) > 1:
            # Two experiments may share what their names begin with.
            label = stem if stems.count(stem) == 1 else f"{members[0].name} and {len(members) - 1} more"
            for run in members:
                run.group = label
