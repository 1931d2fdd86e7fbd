"""Where records go: one small protocol, implemented by stdout here and by each tracker in a file of its own."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from typing import Protocol

from tqdm import tqdm

from milepost.errors import ConfigError, Problem
from milepost.tracking.records import Record


class Sink(Protocol):
    """Somewhere that metrics are shown or kept."""

    def log(self, record: Record) -> None:
        """Take one record in."""
        ...

    def rewind(self, records: Sequence[Record]) -> None:
        """Start or go on with exactly these records logged so far; called before the first `log`, if at all."""
        ...

    def close(self) -> None:
        """Flush and release everything."""
        ...


class StdoutSink:
    """One line per record, above any progress bar: `step 0: {'train/loss': 0.25}`, six significant digits."""

    def log(self, record: Record) -> None:
        """Print the record."""
        shown = {name: x if isinstance(x, int) else float(f"{x:.6g}") for name, x in record.metrics.items()}
        say(f"{record.kind} {record.index}: {shown}")

    def rewind(self, records: Sequence[Record]) -> None:
        """Nothing: what was printed stays printed."""

    def close(self) -> None:
        """Nothing to release."""


def say(text: str) -> None:
    """Print a line at once, above any progress bar."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


def need_package(module: str, path: str, command: str) -> None:
    """Raise ConfigError, naming the `pip` command, unless `module` is installed; `path` is what asked for it."""
    if importlib.util.find_spec(module) is None:
        raise ConfigError([Problem(path, f"the package {module} is not installed; run: {command}")])
