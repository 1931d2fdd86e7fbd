"""Every error milepost raises on purpose.

A message says what was given, what was expected and what to do. `exit_code` is what the command line exits with.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


class MilepostError(Exception):
    """Base class of the errors milepost raises on purpose; shown to a user without a traceback."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a run config: where it is, what is wrong, where the value came from."""

    path: str
    """Dotted path in the run config, for example `optimizer.lr`."""
    message: str
    origin: str = ""
    """File and line, or the flag, that gave the value; empty where nothing gave it."""

    def __str__(self) -> str:
        where = f" ({self.origin})" if self.origin else ""
        return f"{self.path}: {self.message}{where}" if self.path else f"{self.message}{where}"


class ConfigError(MilepostError):
    """The run config is wrong; carries every problem at once."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "1 problem in the run config" if count == 1 else f"{count} problems in the run config"
        super().__init__(head + "\n" + "\n".join(f"  {problem}" for problem in self.problems))


class PluginError(MilepostError):
    """A plugin or component was asked for that cannot be had."""


class DataError(MilepostError):
    """A data file or a row of it is unusable."""


class CheckpointError(MilepostError):
    """A checkpoint is missing, incomplete or belongs to another run."""


class ClusterError(MilepostError):
    """A cluster cannot be reached, or does not take what it is sent."""


class TransportError(MilepostError):
    """A weight push did not go through; the engines it concerns are fenced."""

    exit_code = 1


class EngineGone(TransportError):  # noqa: N818 it names what happened
    """An engine did not answer in a push: it died, or hangs. It did not refuse anything."""

    def __init__(self, endpoint: str, message: str) -> None:
        super().__init__(message)
        self.endpoint = endpoint


class RunError(MilepostError):
    """A run had to stop: rewards failing throughout, non-finite steps in a row, a constant reward."""

    exit_code = 1


class PhaseError(RunError):
    """A memory event came out of order."""
