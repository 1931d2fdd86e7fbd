"""`milepost plugins`: what is installed, what became of it, what options it takes; writing and checking one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import click
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from milepost.cli.options import block_option
from milepost.cli.plugin_lookup import find, import_limit_option, indent, json_option, kind_option, load_plugins
from milepost.cli.plugins_check import check_plugin
from milepost.cli.plugins_new import new_plugin
from milepost.components import Kind
from milepost.registry import PluginRecord, Provided


@click.group()
def plugins() -> None:
    """See which plugins are installed and what they provide; write one, check one."""


plugins.add_command(new_plugin)
plugins.add_command(check_plugin)


@plugins.command("list")
@block_option
@import_limit_option
@json_option
def list_plugins(block: tuple[str, ...], import_limit: float, as_json: bool) -> None:
    """List every plugin: where it comes from, whether it loaded, what it provides."""
    registry = load_plugins(block, import_limit)
    if as_json:
        listed = [_plugin_json(record) for record in registry.plugins]
        click.echo(json.dumps({"plugins": listed, "warnings": list(registry.warnings)}, indent=2))
        return
    if not registry.plugins:
        click.echo("no plugins are installed")
        return
    rows: list[tuple[str, ...]] = [("PLUGIN", "FROM", "STATE", "PROVIDES")]
    for record in registry.plugins:
        provides = ", ".join(f"{item.kind} {item.name}" for item in record.components)
        rows.append((record.name, record.origin, record.state, provides or "-"))
    for line in _table(rows):
        click.echo(line)
    for record in registry.plugins:
        if record.error:
            click.echo(f"\n{record.name} from {record.origin} is {record.state}:\n{indent(record.error)}")


@plugins.command("show")
@click.argument("name")
@kind_option
@block_option
@import_limit_option
@json_option
def show_plugin(name: str, kind: Kind | None, block: tuple[str, ...], import_limit: float, as_json: bool) -> None:
    """Show a component's options with their types, defaults and meaning, and where it comes from.

    NAME is a component, or a plugin whose components are then shown.
    """
    found = find(load_plugins(block, import_limit), name, kind)
    if as_json:
        click.echo(json.dumps({"components": [_component_json(item) for item in found]}, indent=2))
        return
    click.echo("\n\n".join("\n".join(_component_lines(item)) for item in found))


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
        "traits": dict(_traits(item)),
        "options": item.component.options.model_json_schema(),
    }


def _component_lines(item: Provided) -> Iterator[str]:
    yield f"{item.kind} {item.name}: {item.component.summary}"
    facts = [("from", f"plugin {item.plugin}, {item.origin}"), *_traits(item)]
    for line in _table(facts):
        yield f"  {line}"
    options = list(_option_lines(item.component.options))
    yield "  options" if options else "  no options"
    for line in options:
        yield f"    {line}"


def _traits(item: Provided) -> Iterator[tuple[str, str]]:
    """The traits that say something: neither functions, which a reader cannot look into, nor what is empty."""
    for trait in dataclasses.fields(item.component.traits):
        value = getattr(item.component.traits, trait.name)
        if isinstance(value, bool):
            yield trait.name, "yes" if value else "no"
        elif isinstance(value, (tuple, frozenset)):
            yield trait.name, ", ".join(sorted(value)) or "none"
        elif value and not callable(value):
            yield trait.name, str(value)


def _option_lines(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Name, type, default and meaning of each option; those of a nested model follow it, with a dotted name."""
    model.model_rebuild()  # descriptions and late annotations are filled in when a model is first used
    for name, info in model.model_fields.items():
        yield f"{prefix}{name}: {type_text(info.annotation, info.metadata)}{_default(info)}"
        if info.description:
            yield f"    {' '.join(info.description.split())}"
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            yield from _option_lines(info.annotation, f"{prefix}{name}.")


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return " (required)"
    if info.default_factory is not None:
        return " (default made anew)"
    return f" = {info.default!r}"


def type_text(annotation: Any, metadata: Iterable[object] = ()) -> str:
    """A type as one would write it, followed by its limits."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        constraints = [part for part in arguments[1:] for part in (getattr(part, "metadata", None) or [part])]
        return type_text(arguments[0], constraints)
    if origin is Literal:
        text = " | ".join(repr(choice) for choice in arguments)
    elif origin in (Union, UnionType):
        text = " | ".join(type_text(choice) for choice in arguments)
    elif arguments:
        text = f"{getattr(origin, '__name__', origin)}[{', '.join(type_text(part) for part in arguments)}]"
    elif annotation in (None, type(None)):
        text = "None"
    elif annotation is Ellipsis:
        text = "..."
    else:
        text = getattr(annotation, "__name__", str(annotation))
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    limits = [
        f"{sign} {getattr(part, name):g}" for part in metadata for name, sign in signs.items() if hasattr(part, name)
    ]
    return f"{text} ({', '.join(limits)})" if limits else text


def _table(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
