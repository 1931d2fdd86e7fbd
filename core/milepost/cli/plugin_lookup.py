"""What the `milepost plugins` commands share: loading plugins, and finding what a name means."""

from __future__ import annotations

import click

from milepost.components import KINDS, Kind
from milepost.discovery import unknown
from milepost.errors import PluginError
from milepost.registry import Provided, Registry

IMPORT_LIMIT = 10.0
"""Seconds a plugin's import may take in these commands, which are there to say what is wrong."""

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
kind_option = click.option("--kind", type=click.Choice(KINDS), help="Only a component of this kind.")
import_limit_option = click.option(
    "--import-limit",
    type=click.FloatRange(min=0.0, min_open=True),
    default=IMPORT_LIMIT,
    show_default=True,
    metavar="SECONDS",
    help="Stop a plugin whose import takes longer, and list it as broken.",
)


def load_plugins(block: tuple[str, ...], import_limit: float | None = IMPORT_LIMIT) -> Registry:
    """Load the installed plugins, and say what a user should know of it."""
    registry = Registry.load(block=block, import_limit=import_limit)
    warn(registry)
    return registry


def warn(registry: Registry) -> None:
    """Print a registry's warnings to stderr."""
    for warning in registry.warnings:
        click.echo(f"warning: {warning}", err=True)


def find(registry: Registry, name: str, kind: Kind | None) -> list[Provided]:
    """Return what NAME means; raises PluginError with everything there is to say where it means nothing usable."""
    if kind is not None:
        return [registry.get(kind, name)]
    kinds = [
        k for k in KINDS if any(item.name == name for r in registry.plugins for item in r.components if item.kind == k)
    ]
    if kinds:
        return [registry.get(k, name) for k in kinds]
    records = [record for record in registry.plugins if record.name == name]
    components = [item for record in records for item in record.components]
    if components:
        return components
    for record in records:
        detail = (record.traceback or record.error).rstrip()
        raise PluginError(f"plugin {name!r} from {record.origin} is {record.state}" + (f"\n{detail}" if detail else ""))
    known = sorted({item.name for k in KINDS for item in registry.provided(k)} | {r.name for r in registry.plugins})
    raise PluginError("\n  ".join([unknown("component or plugin", name, known), *registry.failures()]))


def indent(text: str, margin: str = "  ") -> str:
    """Return text with a margin before every line."""
    return "\n".join(f"{margin}{line}" for line in text.splitlines())
