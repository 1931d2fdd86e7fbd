"""What is written down during a run, and the JSON Lines files it is written to.

`metrics.jsonl` is standard JSON: one object a line, its keys in the order kind, index, rollout, the metrics, time. JSON
has no NaN and no infinities, so they are the texts "NaN", "Infinity" and "-Infinity"; `read_records` turns them back.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.errors import DataError

RESERVED = ("kind", "index", "rollout", "time")
"""Keys of a line that are not metrics."""

STEP_KINDS = frozenset({"step", "critic"})
"""Kinds whose records are counted by optimizer step, not by rollout."""

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True, slots=True)
class Record:
    """Metrics of one kind at one point of a run."""

    kind: str
    """What the metrics are about: `perf`, `rollout`, `step` and `critic` (optimizer steps), `eval`."""
    index: int
    """Number within the kind: the optimizer step for those of `STEP_KINDS`, else the rollout."""
    rollout: int
    """Rollout to which they belong."""
    metrics: Mapping[str, float]
    time: float
    """Seconds since the epoch."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as the object of one line."""
        head = {"kind": self.kind, "index": self.index, "rollout": self.rollout}
        return {**head, **self.metrics, "time": self.time}

    @staticmethod
    def from_json(line: Mapping[str, Any]) -> Record:
        """Return the record of one line."""
        metrics = {name: _NONFINITE.get(x, x) for name, x in line.items() if name not in RESERVED}
        return Record(line["kind"], line["index"], line["rollout"], metrics, line["time"])


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a `metrics.jsonl`; a half-written last line is left out.

    Raises:
        DataError: with file and line, for any other line that is broken.
    """
    return map(Record.from_json, read_lines(path))


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON Lines file that a run wrote; a half-written last line is left out.

    Raises:
        DataError: with file and line, for any other line that is broken.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return  # the process died while writing it
            try:
                value = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}:{number}: expected one JSON object per line: {error}") from error
            if not isinstance(value, dict):
                raise DataError(f"{path}:{number}: expected a JSON object, found {type(value).__name__}")
            yield value


class LineFile:
    """A JSON Lines file of a run: every line is handed to the system at once, and the file can be taken back."""

    def __init__(self, path: Path) -> None:
        """Open for appending, after dropping a last line that a killed process left half-written."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)  # so that nothing is left to write when a full disk has ended the run
        self.truncate(self.size)

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self.path.stat().st_size

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line. Raises OSError if the disk is full; a half-written line is dropped by the next `LineFile`."""
        data = memoryview(_encode(line))
        while data:
            data = data[self._file.write(data) :]

    def truncate(self, size: int) -> None:
        """Take the file back to `size` bytes, in whole lines; one that is shorter (or was deleted) stays as it is."""
        self._file.truncate(min(size, self.size))
        self._file.truncate(_length_of_whole_lines(self.path))

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _length_of_whole_lines(path: Path) -> int:
    """Return the bytes up to and including the last newline."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            if (last := file.read(end - start).rfind(b"\n")) >= 0:
                return start + last + 1
            end = start
    return 0


def _encode(line: Mapping[str, Any]) -> bytes:
    text = json.dumps(_standard(line), ensure_ascii=False, allow_nan=False, default=repr)
    # Half of a surrogate pair, which a label may hold, has no UTF-8; an escape is how JSON writes it.
    return text.encode(errors="backslashreplace") + b"\n"


def _standard(value: Any) -> Any:
    """Replace what standard JSON has no number for by its text."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _standard(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_standard(item) for item in value]
    return value
