"""`milepost plugins`: what is installed, what became of it, and what options it takes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from milepost.components import KINDS, Kind
from milepost.discovery import unknown
from milepost.errors import PluginError
from milepost.registry import PluginRecord, Provided, Registry

SLOW_SECONDS = 1.0
"""Imports slower than this are pointed out: an entry-point module is meant to be light."""

block_option = click.option(
    "--block",
    multiple=True,
    metavar="NAME",
    help="Do not import this plugin: NAME or DISTRIBUTION:NAME. May be repeated.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def plugins() -> None:
    """See which plugins are installed and what they provide."""


@plugins.command("list")
@block_option
@json_option
def list_plugins(block: tuple[str, ...], as_json: bool) -> None:
    """List every plugin: where it comes from, whether it loaded, what it provides."""
    registry = _load(block)
    if as_json:
        listed = [_plugin_json(record) for record in registry.plugins]
        click.echo(json.dumps({"plugins": listed, "warnings": list(registry.warnings)}, indent=2))
        return
    if not registry.plugins:
        click.echo("no plugins are installed")
        return
    rows = [("PLUGIN", "FROM", "STATE", "PROVIDES")]
    for record in registry.plugins:
        provides = ", ".join(f"{item.kind} {item.name}" for item in record.components)
        rows.append((record.name, record.origin, record.state, provides or "-"))
    for line in _table(rows):
        click.echo(line)
    for record in registry.plugins:
        if record.error:
            click.echo(f"\n{record.name} from {record.origin} is {record.state}:\n{_indent(record.error)}")
    for record in registry.plugins:
        if record.seconds > SLOW_SECONDS:
            slow = f"{record.name} from {record.origin} took {record.seconds:.1f} s to import"
            click.echo(f"\n{slow}; what is heavy belongs in the component's build")


@plugins.command("show")
@click.argument("name")
@click.option("--kind", type=click.Choice(KINDS), help="Only a component of this kind.")
@block_option
@json_option
def show_plugin(name: str, kind: Kind | None, block: tuple[str, ...], as_json: bool) -> None:
    """Show a component's options with their types, defaults and meaning, and where it comes from.

    NAME is a component, or a plugin whose components are then shown.
    """
    found = _find(_load(block), name, kind)
    if as_json:
        click.echo(json.dumps({"components": [_component_json(item) for item in found]}, indent=2))
        return
    click.echo("\n\n".join("\n".join(_component_lines(item)) for item in found))


def _load(block: tuple[str, ...]) -> Registry:
    registry = Registry.load(block=block)
    for warning in registry.warnings:
        click.echo(f"warning: {warning}", err=True)
    return registry


def _find(registry: Registry, name: str, kind: Kind | None) -> list[Provided]:
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


def _plugin_json(record: PluginRecord) -> dict[str, Any]:
    plain = {f.name: getattr(record, f.name) for f in dataclasses.fields(record) if f.name != "components"}
    plain["components"] = [
        {"kind": item.kind, "name": item.name, "summary": item.component.summary} for item in record.components
    ]
    return plain


def _component_json(item: Provided) -> dict[str, Any]:
    return {
        "kind": item.kind,
        "name": item.name,
        "summary": item.component.summary,
        "plugin": item.plugin,
        "distribution": item.distribution,
        "version": item.version,
        "origin": item.origin,
        "traits": {key: str(value) for key, value in _traits(item)},
        "options": item.component.options.model_json_schema(),
    }


def _component_lines(item: Provided) -> Iterator[str]:
    yield f"{item.kind} {item.name}: {item.component.summary}"
    yield f"  from     plugin {item.plugin}, {item.origin}"
    for key, value in _traits(item):
        yield f"  {key:<8} {value}"
    rows = list(_option_rows(item.component.options))
    yield "  options" if rows else "  options  none"
    for line in _table(rows):
        yield f"    {line}"


def _traits(item: Provided) -> Iterator[tuple[str, Any]]:
    """The traits that are plain values; functions say nothing to a reader."""
    for trait in dataclasses.fields(item.component.traits):
        value = getattr(item.component.traits, trait.name)
        if isinstance(value, (tuple, frozenset)):
            yield trait.name, ", ".join(sorted(value))
        elif value is not None and not callable(value):
            yield trait.name, value


def _option_rows(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    for name, info in model.model_fields.items():
        default = "required" if info.is_required() else f"= {_default(info)}"
        doc = " ".join((info.description or "").split())
        yield f"{prefix}{name}", _type(info), default, doc
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _option_rows(info.annotation, f"{prefix}{name}.")


def _default(info: FieldInfo) -> str:
    return repr(info.get_default(call_default_factory=True, validated_data={}))


def _type(info: FieldInfo) -> str:
    """The field's type as one would write it, followed by its limits."""
    limits = [_limit(part) for part in info.metadata]
    return ", ".join([_annotation(info.annotation), *(limit for limit in limits if limit)])


def _limit(part: object) -> str:
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    return " ".join(f"{sign} {getattr(part, name)}" for name, sign in signs.items() if hasattr(part, name))


def _annotation(annotation: Any) -> str:
    if isinstance(annotation, type) and not get_args(annotation):
        return "None" if annotation is type(None) else annotation.__name__
    if get_origin(annotation) is None:
        return str(annotation).removeprefix("typing.")
    return str(annotation).replace("typing.", "").replace("NoneType", "None")


def _table(rows: list[tuple[str, ...]] | list[tuple[str, str, str, str]]) -> Iterator[str]:
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
