"""Checking whole plugins: installed ones by name, and ones that lie in a folder, as their author has them."""

from __future__ import annotations

import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from milepost import testing
from milepost.components import Kind
from milepost.discovery import PluginRecord
from milepost.entry_points import normalise
from milepost.errors import PluginError
from milepost.hookspecs import GROUP
from milepost.registry import Provided, Registry
from milepost.testing.findings import Finding, Findings


@dataclass(frozen=True, slots=True)
class Settings:
    """What a component is checked with."""

    options: Mapping[str, Any] = field(default_factory=dict)
    label: Any = None
    """Label of a reward's samples; None for the kit's own."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata of a reward's samples."""
    timeout: float | None = None
    """Seconds that one score of a reward may take; None for the kit's own limit."""
    config: Path | None = None
    """`config.json` that a model recipe is tried on."""


@dataclass(frozen=True, slots=True)
class Report:
    """What came of checking one plugin or one of its components."""

    what: str
    """`KIND NAME`, or `plugin NAME`."""
    origin: str
    findings: tuple[Finding, ...]


def check_component(item: Provided, settings: Settings) -> Report:
    """Run the kit on one component. Raises PluginError if the options do not fit it."""
    component, what = item.component, f"{item.kind} {item.name}"
    try:
        options = component.options.model_validate(dict(settings.options))
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, p['loc'])) or 'options'}: {p['msg']}" for p in error.errors(include_url=False)]
        lines = [f"options of {what} from {item.origin} are wrong; give them with --set KEY=VALUE", *problems]
        raise PluginError("\n  ".join(lines)) from None
    findings = Findings()
    with findings.surviving("builds", repr(options)):
        component.build(options)
    if not findings:
        findings.extend(_run(item.kind, component, settings))
    return Report(what, item.origin, tuple(findings))


def _run(kind: Kind, component: Any, settings: Settings) -> list[Finding]:
    options = settings.options or None
    more: dict[str, Any] = {}
    if kind == "reward":
        given = {"label": settings.label, "timeout": settings.timeout}
        more = {"metadata": settings.metadata, **{name: value for name, value in given.items() if value is not None}}
    elif kind == "model":
        more = {"config": settings.config}
    checks: dict[Kind, Callable[..., list[Finding]]] = {
        "algorithm": lambda *args, **kwargs: testing.check_algorithm(*args, **kwargs),
        "advantage": lambda *args, **kwargs: testing.check_advantage(*args, **kwargs),
        "reward": lambda *args, **kwargs: testing.check_reward(*args, **kwargs),
        "model": lambda *args, **kwargs: testing.check_model(*args, **kwargs),
        "transport": lambda *args, **kwargs: testing.check_transport(*args, **kwargs),
    }
    return checks[kind](component, options, **more)


def check_record(record: PluginRecord) -> Report:
    """Check what a plugin promises as a whole: that it loads, is nobody's rival, and is light."""
    findings = []
    if record.state != "ok":
        detail = (record.traceback or record.error).strip()
        findings.append(Finding("loads", "registration", "state ok", f"state {record.state}\n{detail}"))
    findings += [Finding("light import", "registration", "a light entry-point module", b) for b in record.burdens]
    return Report(f"plugin {record.name}", record.origin, tuple(findings))


def check_records(records: Iterable[PluginRecord], settings: Settings, kind: Kind | None = None) -> list[Report]:
    """Check plugins, and each component they provide, of one kind if it is given."""
    reports = []
    for record in records:
        reports.append(check_record(record))
        reports += [
            check_component(item, settings)
            for item in record.components
            if record.state == "ok" and kind in (None, item.kind)
        ]
    return reports


@contextmanager
def plugins_at(path: Path, block: Sequence[str] = ()) -> Iterator[tuple[Registry, list[PluginRecord]]]:
    """Load the plugins of a folder with a pyproject.toml, a package or a module, beside those that are installed.

    Nothing is installed: the folder (or its `src`) is on the module path while the body runs, and stands in the place
    of an installed distribution of the same name. Yields the registry and the records of these plugins.

    Raises PluginError if there is nothing of the kind at `path`, or its pyproject.toml names no plugin.
    """
    path = path.absolute()
    before = list(sys.path)
    with tempfile.TemporaryDirectory(prefix="milepost-check-") as folder:
        try:
            if (path / "pyproject.toml").is_file():
                name = _stand_in(path, Path(folder))
                registry = Registry.load(block=block)
                found = [record for record in registry.plugins if normalise(record.distribution) == normalise(name)]
            elif path.suffix == ".py" or (path / "__init__.py").is_file():
                registry = Registry.load(block=block, modules=[path.stem], base_dir=path.parent)
                found = [record for record in registry.plugins if record.label == f"local:{path.stem}"]
            else:
                raise PluginError(
                    f"{path} is no plugin; expected a folder with a pyproject.toml, a module NAME.py or a package"
                )
            yield registry, found
        finally:
            sys.path[:] = before


def _stand_in(path: Path, folder: Path) -> str:
    """Put a distribution's source on the module path, with metadata as an installation would write it."""
    project = tomllib.loads((path / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    entries: Mapping[str, str] = project.get("entry-points", {}).get(GROUP, {})
    name, version = project.get("name"), project.get("version", "unknown")
    if not name or not entries:
        raise PluginError(
            f"{path / 'pyproject.toml'} names no plugin; expected a name and a table "
            f'[project.entry-points.{GROUP}] with lines such as `my_reward = "my_reward"`'
        )
    info = folder / f"{normalise(name).replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    lines = [f"[{GROUP}]", *(f"{entry} = {value}" for entry, value in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    source = path / "src" if (path / "src").is_dir() else path
    sys.path[:0] = [str(source), str(folder)]
    return str(name)
