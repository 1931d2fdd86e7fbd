"""Writing a new plugin: a distribution of its own that passes its own tests and the conformance kit as it is."""

from __future__ import annotations

import json
import keyword
import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from milepost import __version__
from milepost.components import Kind, ModelTraits
from milepost.errors import PluginError
from milepost.registry import FALLBACK, Registry

TEMPLATES = Path(__file__).parent / "templates"
SUFFIX = ".tmpl"
NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*([-_][A-Za-z0-9]+)*")

_USE: Mapping[Kind, str] = {
    "reward": "    reward: {name: @MODULE@, right: 1.0}",
    "algorithm": "    algorithm: {name: @MODULE@, ratio_cap: 2.0}",
    "advantage": "    advantage: {name: @MODULE@, limit: 1.0}",
    "model": "    model: {path: PATH, recipe: @MODULE@}      # found by architecture, too",
    "transport": "    transport: {name: @MODULE@}",
}


def new_plugin(kind: Kind, name: str, out: Path, *, registry: Registry, config: Path | None = None) -> list[Path]:
    """Write a distribution `name` with one plugin of this kind into the new folder `out`; return its files.

    `config` is the `config.json` (or its folder) that a model recipe is made from.

    Raises PluginError if the name is not one or is taken, the folder has something in it, a model has no config, or its
    architecture is served already or is not understood.
    """
    module = name.lower().replace("-", "_")
    _check_name(kind, name, module, registry)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PluginError(f"{out} exists and is not an empty folder; choose another with --out")
    if (kind == "model") != (config is not None):
        what = (
            "a model recipe is made from a checkpoint's config.json" if kind == "model" else f"{_a(kind)} has no config"
        )
        raise PluginError(f"{what}; {'give it with --config PATH' if kind == 'model' else 'leave --config out'}")
    values = {
        "NAME": name,
        "MODULE": module,
        "CLASS": "".join(part.capitalize() for part in module.split("_")),
        "KIND": kind,
        "ARTICLE": _a(kind).partition(" ")[0].capitalize(),
        "A_KIND": _a(kind),
        "VERSION": __version__,
        "USE": _USE[kind].replace("@MODULE@", module),
    }
    extra: dict[str, str] = {}
    if config is not None:
        found = _model_values(config, registry)
        values |= found
        extra["tests/config.json"] = json.dumps(_read_json(config), indent=2) + "\n"
    written = []
    for path, text in [*_filled(kind, values), *extra.items()]:
        file = out / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        written.append(file)
    return sorted(written)


def _a(kind: Kind) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _check_name(kind: Kind, name: str, module: str, registry: Registry) -> None:
    if not NAME.fullmatch(name) or keyword.iskeyword(module):
        raise PluginError(
            f"{name!r} cannot be the name of a distribution and a module; expected letters, digits, - and _, beginning "
            "with a letter, as in my-reward"
        )
    if module in registry.names(kind):
        origin = registry.get(kind, module).origin
        raise PluginError(
            f"there is {_a(kind)} {module!r} already, from {origin}; two of one name conflict: choose another"
        )
    if module in sys.stdlib_module_names or find_spec(module) is not None:
        raise PluginError(f"there is a module {module!r} already in this environment; choose another name")


def _filled(kind: Kind, values: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield path and text of each file."""
    for room in ("common", kind):
        for template in sorted((TEMPLATES / room).rglob(f"*{SUFFIX}")):
            path = template.relative_to(TEMPLATES / room).as_posix().removesuffix(SUFFIX)
            yield _fill(path, values), _fill(template.read_text(encoding="utf-8"), values)


def _fill(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], text)


def _read_json(config: Path) -> dict[str, Any]:
    file = config / "config.json" if config.is_dir() else config
    try:
        read = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PluginError(f"{file} cannot be read as JSON: {error}; give a checkpoint's config.json") from error
    if not isinstance(read, dict) or not read.get("architectures") or not read.get("model_type"):
        raise PluginError(
            f"{file} has no `architectures` and `model_type`; give a Hugging Face checkpoint's config.json"
        )
    return read


def _model_values(config: Path, registry: Registry) -> dict[str, str]:
    read = _read_json(config)
    architecture = str(read["architectures"][0])
    try:
        served = registry.for_architecture(architecture)
    except PluginError:
        served = None  # served by nobody, or by several, which is the registry's to complain of
    if served is not None and FALLBACK not in cast(ModelTraits, served.component.traits).architectures:
        raise PluginError(
            f"{architecture} is served by recipe {served.name!r} from {served.origin}, and two recipes of one "
            f"architecture conflict; use that one, or leave it out with --block {served.label}"
        )
    from milepost.scaffold.shapes import layout_values

    return {"ARCHITECTURE": architecture, **layout_values(read)}
