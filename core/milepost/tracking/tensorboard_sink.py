"""Records to TensorBoard events under RUN_DIR/tensorboard."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from milepost.tracking.records import Record
from milepost.tracking.sinks import need_package


class TensorBoardSink:
    """Writes every metric as a scalar over its record's index.

    `metrics.jsonl` is the truth and events are derived from it: after a resume they are written anew, because events
    of lost rollouts cannot be taken out of a file.
    """

    def __init__(self, run_dir: Path) -> None:
        need_package("tensorboard", "track.tensorboard", "pip install tensorboard")
        self.folder = run_dir / "tensorboard"
        self._writer: Any = None

    def log(self, record: Record) -> None:
        """Write the record's scalars."""
        if self._writer is None:
            self._open()
        for name, value in record.metrics.items():
            self._writer.add_scalar(name, value, record.index, walltime=record.time)
        self._writer.flush()

    def rewind(self, records: Sequence[Record]) -> None:
        """Replace all events by these records'."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        for record in records:
            self.log(record)

    def close(self) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(self.folder))
