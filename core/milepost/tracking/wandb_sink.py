"""Records to Weights & Biases."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from milepost.config.schema import WandbSection
from milepost.tracking.records import STEP_KINDS, Record
from milepost.tracking.sinks import need_package


class WandbSink:
    """Logs to one W&B run, whose id stays in the run folder so that a resumed run goes on with it.

    W&B's own step counts records, like the lines of `metrics.jsonl`. A resumed run logs the records of lost rollouts
    with the steps they had, and W&B ignores steps it has seen: nothing is doubled. Charts are drawn over `rollout`,
    those of `train/` and `critic/` metrics over `step`.
    """

    def __init__(self, run_dir: Path, section: WandbSection, config: Mapping[str, Any]) -> None:
        need_package("wandb", "track.wandb", "pip install 'milepost[wandb]'")
        self.run_dir = run_dir
        self.section = section
        self.config = config
        self.id_file = run_dir / "wandb-id.txt"
        self._run: Any = None
        self._num_records = 0

    def log(self, record: Record) -> None:
        """Log the record's metrics as one W&B step."""
        if self._run is None:
            self._start()
        axes = {"rollout": record.rollout, **({"step": record.index} if record.kind in STEP_KINDS else {})}
        self._run.log({**record.metrics, **axes}, step=self._num_records)
        self._num_records += 1

    def rewind(self, records: Sequence[Record]) -> None:
        """Go on after these records; with none this is a new run, under an id of its own."""
        self._num_records = len(records)
        if not records:
            self.id_file.unlink(missing_ok=True)

    def close(self) -> None:
        """Finish the W&B run and wait until it is stored."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _start(self) -> None:
        import wandb

        if not self.id_file.exists():
            self.id_file.write_text(uuid.uuid4().hex[:8] + "\n", encoding="utf-8")
        section = self.section
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            name=section.name or self.run_dir.resolve().name,
            id=self.id_file.read_text(encoding="utf-8").strip(),
            resume="allow" if section.mode == "online" else None,  # an offline run is joined by its id when synced
            mode=section.mode,
            dir=self.run_dir,
            config=dict(self.config),
        )
        for axis, prefixes in {"rollout": ("rollout", "perf", "eval"), "step": ("train", "critic")}.items():
            self._run.define_metric(axis, hidden=True)
            for prefix in prefixes:
                self._run.define_metric(f"{prefix}/*", step_metric=axis)
