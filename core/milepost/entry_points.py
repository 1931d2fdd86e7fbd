"""Entry points of the installed distributions, read straight from their files.

The same answer as `importlib.metadata.entry_points(group=...)`, which it falls back on wherever `sys.path` holds more
than plain folders. Importing that module and letting it walk the environment would take a fifth of the time of
`milepost plugins list`: it brings in the whole of `email`, `csv` and `zipfile`.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry point, and the distribution that declares it."""

    name: str
    value: str
    """`module` or `module:attribute`; extras in brackets are ignored."""
    distribution: str
    version: str

    def load(self) -> Any:
        """Import the module and return it, or the attribute of it that is named."""
        module, _, attribute = self.value.partition("[")[0].strip().partition(":")
        loaded = importlib.import_module(module.strip())
        return reduce(getattr, filter(None, attribute.strip().split(".")), loaded)


def normalise(distribution: str) -> str:
    """Return the normal form of a distribution's name (PEP 503): `My_Rewards` and `my-rewards` are one."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def find_entries(group: str) -> Iterator[Entry]:
    """Yield the entry points of a group; of two installations of one distribution the first on `sys.path` counts."""
    if not _only_plain_folders():
        yield from _find_by_importlib(group)
        return
    seen: set[str] = set()
    for folder in map(Path, sys.path):
        try:
            children = sorted(folder.iterdir())
        except OSError:
            continue  # as in importing, an entry of sys.path that is not there is not an error
        for child in children:
            if child.suffix not in (".dist-info", ".egg-info"):
                continue
            name = normalise(child.stem.partition("-")[0])
            if name not in seen:
                seen.add(name)
                yield from _read(child, group)


def _only_plain_folders() -> bool:
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_distributions")]
    if [getattr(finder, "__name__", "") for finder in finders] != ["PathFinder"]:
        return False
    return not any(folder.endswith(".egg") or Path(folder).is_file() for folder in sys.path)


def _read(info: Path, group: str) -> Iterator[Entry]:
    """Read the entry points of one distribution from its metadata folder."""
    text = _text(info / "entry_points.txt")
    if group not in text:
        return
    distribution, version = _identity(info)
    section = ""
    for line in (line.strip() for line in text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1].strip()
        elif section == group and line and not line.startswith("#"):
            name, _, value = line.partition("=")
            yield Entry(name.strip(), value.strip(), distribution, version)


def _identity(info: Path) -> tuple[str, str]:
    """Return name and version from the headers of a distribution's metadata, or else from its folder's name."""
    name, _, version = info.stem.partition("-")
    headers = {"name": name, "version": version or "unknown"}
    for line in _text(info / ("METADATA" if info.suffix == ".dist-info" else "PKG-INFO")).splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        if key.lower() in headers:
            headers[key.lower()] = value.strip()
    return headers["name"], headers["version"]


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, NotADirectoryError):
        return ""


def _find_by_importlib(group: str) -> Iterator[Entry]:
    from importlib.metadata import entry_points

    for entry in entry_points(group=group):
        name, version = (entry.dist.name, entry.dist.version) if entry.dist else ("unknown", "unknown")
        yield Entry(entry.name, entry.value, name, version)
