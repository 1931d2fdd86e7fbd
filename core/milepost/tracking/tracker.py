"""The tracker: what the loop calls to print and keep metrics, samples and progress."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from milepost.config.schema import RunConfig
from milepost.samples import Sample
from milepost.tracking.alarms import AlarmSink
from milepost.tracking.records import RESERVED, STEP_KINDS, LineFile, Record, read_records
from milepost.tracking.sinks import Sink, StdoutSink, say
from milepost.tracking.tensorboard_sink import TensorBoardSink
from milepost.tracking.wandb_sink import WandbSink


class Tracker:
    """Prints metrics and keeps them in RUN_DIR/metrics.jsonl, samples in samples.jsonl, and feeds other sinks.

    Alarms that the metrics raise are printed and kept in alarms.jsonl.

    Whether a run starts or resumes, call `truncate` before the first `log`, so that what a killed process logged
    beyond its checkpoint is not there twice.
    """

    def __init__(self, run_dir: str | Path, *, config: RunConfig, stdout: bool = True, progress: bool = True) -> None:
        """Open the run folder's files.

        Args:
            run_dir: the run folder, made if need be.
            config: the resolved run config; `track` says which other sinks there are.
            stdout: print a line per record.
            progress: show the bars of `bar`.

        Raises:
            ConfigError: if a sink is asked for whose package is not installed.
        """
        self.run_dir = Path(run_dir)
        self.progress = progress
        self.samples_per_rollout = config.track.samples_per_rollout
        self._rollout: int | None = None
        self._stdout = stdout
        self._sinks: list[Sink] = [StdoutSink()] if stdout else []
        # Only the trainer's own old log-probs must give a ratio of 1; the engine's differ by numerics.
        check_ratio = config.trainer.old_log_probs != "engine"
        self._sinks.append(AlarmSink(self.run_dir, check_ratio=check_ratio, say=self.say))
        if config.track.tensorboard:
            self._sinks.append(TensorBoardSink(self.run_dir))
        if config.track.wandb is not None:
            self._sinks.append(WandbSink(self.run_dir, config.track.wandb, config.model_dump(mode="json")))
        self._metrics = LineFile(self.run_dir / "metrics.jsonl")
        self._samples = LineFile(self.run_dir / "samples.jsonl")

    def written(self) -> dict[str, int]:
        """Return the size in bytes of each file of lines: what `truncate` takes them back to after a resume."""
        return {file.path.name: file.size for file in (self._metrics, self._samples)}

    def truncate(self, written: Mapping[str, int]) -> None:
        """Forget what was logged since `written()` gave this, in the other sinks too; `{}` forgets everything."""
        for file in (self._metrics, self._samples):
            file.truncate(written.get(file.path.name, 0))
        records = list(read_records(self._metrics.path))
        for sink in self._sinks:
            sink.rewind(records)

    def say(self, text: str) -> None:
        """Print a line for the user above any progress bar, if the tracker prints at all."""
        if self._stdout:
            say(text)

    def log(self, kind: str, index: int, metrics: Mapping[str, float], *, rollout: int | None = None) -> None:
        """Log metrics of one kind.

        Args:
            kind: `perf`, `rollout`, `eval`, or one of `STEP_KINDS`.
            index: the optimizer step for those, the rollout for all others.
            metrics: name to number; anything `float()` takes.
            rollout: the rollout that a step belongs to, by default the last one that `rollout` metrics were logged
                of; for all others it is `index`.

        Raises:
            ValueError: for a step that belongs to no rollout, or a metric that is called like a key of the line.
        """
        if rollout is None:
            rollout = self._rollout if kind in STEP_KINDS else index
        if rollout is None:
            raise ValueError(f"{kind} {index} was logged before any rollout; pass rollout=, or log that first")
        if kind == "rollout":
            self._rollout = rollout
        if taken := sorted(metrics.keys() & set(RESERVED)):
            raise ValueError(f"a metric cannot be called {taken[0]!r}; give it a section, like 'train/{taken[0]}'")
        numbers = {name: value if type(value) is int else float(value) for name, value in metrics.items()}
        record = Record(kind, index, rollout, numbers, time.time())
        self._metrics.append(record.to_json())
        for sink in self._sinks:
            sink.log(record)

    def samples(self, rollout: int, samples: Sequence[Sample], *, kind: str = "rollout") -> None:
        """Keep `track.samples_per_rollout` of these samples, evenly spread, so that they are of different prompts."""
        count = min(self.samples_per_rollout, len(samples))
        for i in range(count):
            self._samples.append(sample_line(kind, rollout, samples[i * len(samples) // count]))

    def lines(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the lines of one kind that metrics.jsonl holds, those before a resume included."""
        return (record.to_json() for record in read_records(self._metrics.path) if record.kind == kind)

    def bar(self, total: int, desc: str, unit: str = "it") -> tqdm[Any]:
        """Return a progress bar, which shows nothing if the tracker was made without progress."""
        return tqdm(total=total, desc=desc, unit=unit, disable=not self.progress, leave=False, dynamic_ncols=True)

    def close(self) -> None:
        """Close files and sinks; wait until W&B has stored everything."""
        self._metrics.close()
        self._samples.close()
        for sink in self._sinks:
            sink.close()

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def sample_line(kind: str, rollout: int, sample: Sample) -> dict[str, Any]:
    """Return a sample as a line of samples.jsonl."""
    prompt_len = len(sample.task.tokens)
    return {
        "kind": kind,
        "rollout": rollout,
        "task": sample.task.index,
        "group": sample.group,
        "prompt": sample.task.prompt,
        "text": sample.text,
        "rewards": sample.rewards,
        "label": sample.task.label,
        "status": str(sample.status),
        "prompt_len": prompt_len,
        "response_len": len(sample) - prompt_len,
    }
