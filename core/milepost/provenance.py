"""Where a run came from, kept in its folder beside the config: origins of values, and who provided its parts."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from milepost import __version__, registry
from milepost.config.plan import Plan
from milepost.errors import DataError

FILE = "provenance.json"


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a run folder says about where its config and parts came from; all empty if it says nothing."""

    origins: Mapping[str, str] = field(default_factory=dict)
    """Dotted path to the origin of the value."""
    components: Mapping[str, str] = field(default_factory=dict)
    """Section to component and distribution, for example `grpo, from milepost 0.1.0`."""
    plugins: Mapping[str, str] = field(default_factory=dict)
    """Distributions of loaded plugins and their versions."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of milepost and Python."""


def write_provenance(plan: Plan) -> None:
    """Write down where the plan's values and components came from, in its run folder."""
    choices = {name: getattr(plan, name) for name in ("model", "algorithm", "advantage", "reward", "transport")}
    data = {
        "origins": dict(plan.origins),
        "components": {name: f"{choice.name}, from {choice.distribution}" for name, choice in choices.items()},
        "plugins": registry.current().distributions(),
        "versions": {"milepost": __version__, "python": platform.python_version()},
    }
    (plan.run_dir / FILE).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read_provenance(run_dir: Path) -> Provenance:
    """Return what `write_provenance` wrote, empty if it did not. Raises DataError if the file is broken."""
    file = run_dir / FILE
    if not file.is_file():
        return Provenance()
    try:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return Provenance(**{key: dict(data[key]) for key in ("origins", "components", "plugins", "versions")})
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file} is broken: {error!r}; delete it to go on without the origins of values") from error
