"""What goes wrong in another process, and how it comes back to the controller.

Exceptions do not travel between processes: what can be rebuilt exactly (milepost's own errors) is, everything else
becomes a `WorkerError`; its traceback stands in the log of its process.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from milepost import errors
from milepost.errors import ConfigError, EngineGone, MilepostError, Problem


class WorkerError(MilepostError):
    """A process of the run raised something that it should not have."""

    exit_code = 1


class WorkerLostError(MilepostError):
    """A process of the run died, or did not leave its phase in time; a restart may help."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as plain data."""

    kind: str
    message: str
    problems: tuple[Problem, ...] = ()
    """Of a ConfigError."""
    endpoint: str = ""
    """Of an EngineGone."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Take an exception apart."""
        problems = error.problems if isinstance(error, ConfigError) else ()
        endpoint = error.endpoint if isinstance(error, EngineGone) else ""
        return cls(type(error).__name__, str(error), problems, endpoint)

    @property
    def is_ours(self) -> bool:
        """Whether milepost raised it on purpose."""
        kind = getattr(errors, self.kind, None)
        return isinstance(kind, type) and issubclass(kind, MilepostError)

    def error(self, where: str) -> MilepostError:
        """Return an exception that says the same; `where` names process and phase."""
        if self.kind == "ConfigError":
            return ConfigError(self.problems)
        if self.kind == "EngineGone":
            return EngineGone(self.endpoint, self.message)
        if self.is_ours:
            error: MilepostError = getattr(errors, self.kind)(self.message)
            return error
        return WorkerError(f"{where} failed with {self.kind}: {self.message}")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call in another process gave."""

    value: Any = None
    failure: Failure | None = None
