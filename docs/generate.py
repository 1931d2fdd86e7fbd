"""Write the pages of the guide that the code knows best: configuration.md, metrics.md and plugins/reference.md.

python docs/generate.py            write them
python docs/generate.py --check    exit 1 if one is out of date, write nothing
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from milepost import hookspecs
from milepost.cli.plugins import type_text as option_type
from milepost.components import KERNEL_KEYS, TRAITS, attribute_docs
from milepost.config.schema import ComponentSection, RunConfig, Section
from milepost.discovery import HOOKS
from milepost.registry import Provided, Registry
from milepost.tracking.catalogue import render_markdown
from pydantic import BaseModel
from pydantic.fields import FieldInfo

DOCS = Path(__file__).resolve().parent
NOTICE = "<!-- Written by docs/generate.py from the code; edit the docstrings there and run `make docs`. -->"

CONFIGURATION = f"""\
{NOTICE}

# Configuration

A run config is a YAML file of sections. Several are composed from left to right, and `--set` has the last word:

    milepost train base.yaml mine.yaml --set optimizer.lr=2e-6

Mappings merge key by key; lists and single values replace. Relative paths are taken from the folder of the last file.
Unknown keys are errors, and all errors are reported at once. `milepost plan` shows the resolved run, the origin of
every value and everything derived from it, without starting anything. `milepost config schema` prints a JSON Schema
with which an editor checks and completes run configs.

Sections marked *plugin* take the options of the component they name beside the keys listed here;
`milepost plugins show NAME` lists those.
"""

METRICS = f"""\
{NOTICE}

# Metrics

Every metric goes to stdout, to `metrics.jsonl` in the run folder, and to wandb and TensorBoard when asked.

"""

REFERENCE = f"""\
{NOTICE}

# Plugin reference

A plugin is a module with hooks, named in the entry-point group `milepost`. Every hook takes no argument and returns an
iterable of `milepost.Component(name, options, traits, build, summary)`.
"""


def type_text(annotation: Any) -> str:
    """A field's type as a reader of YAML understands it; bounds and validators aside."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_text(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_text(choice) for choice in arguments)
    if origin is dict:
        return "mapping"
    if origin is tuple:
        elements = [part for part in arguments if part is not Ellipsis]
        return f"list of {type_text(elements[0])}" if Ellipsis in arguments else f"list of {len(elements)} numbers"
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    names = {str: "text", int: "whole number", float: "number", bool: "`true` or `false`", type(None): "`null`"}
    return names[annotation]


def default_text(field: FieldInfo) -> str:
    """A field's default, in YAML."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=1000).removesuffix("\n").removesuffix("\n...")
    return f"`{text}`"


def nested_sections(annotation: Any) -> Iterator[type[Section]]:
    """The sections that appear within a field's type."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for argument in get_args(annotation):
        yield from nested_sections(argument)


def section_lines(title: str, section: type[Section], seen: set[type[Section]]) -> Iterator[str]:
    """One section's heading and table, then those of the sections that first appear within it."""
    seen.add(section)
    yield f"\n## {title}\n"
    plugin = f" *plugin: {section.kind}*" if issubclass(section, ComponentSection) else ""
    yield f"{' '.join((section.__doc__ or '').split())}{plugin}\n"
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    inner: list[type[Section]] = []
    for name, field in section.model_fields.items():
        meaning = " ".join((field.description or "").split())
        cells = (f"`{name}`", type_text(field.annotation), default_text(field), meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        inner += [found for found in nested_sections(field.annotation) if found not in seen and found not in inner]
    for found in inner:
        yield from section_lines(found.__name__, found, seen)


def configuration() -> str:
    """The configuration page: every section and key of a run config."""
    lines = [CONFIGURATION]
    seen: set[type[Section]] = set()
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        assert isinstance(section, type)
        lines += section_lines(name, section, seen)
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def plain_type(annotation: Any) -> str:
    """An annotation as it is written, for readers of Python."""
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return text.replace("typing.", "")


def hook_lines(hook: str) -> Iterator[str]:
    """One hook: its docstring, the traits of its kind, and the section keys that are the kernel's."""
    kind = HOOKS[hook]
    summary, _, rest = inspect.cleandoc(getattr(hookspecs, hook).__doc__ or "").partition("\n\n")
    yield f"\n## {hook}\n"
    yield f"{summary}\n"
    yield rest.replace("Example::", "Example:")
    traits = TRAITS[kind]
    yield f"\n### {traits.__name__}\n"
    yield f"{inspect.cleandoc(traits.__doc__ or '')}\n"
    yield "| trait | type | default | meaning |"
    yield "|---|---|---|---|"
    described = attribute_docs(traits)
    for field in dataclasses.fields(traits):
        default = "required"
        if field.default is not dataclasses.MISSING:
            shown = sorted(field.default) if isinstance(field.default, frozenset) else field.default
            default = f"`{shown!r}`"
        elif field.default_factory is not dataclasses.MISSING:
            default = "`{}`"
        meaning = " ".join(described.get(field.name, "").split())
        cells = (f"`{field.name}`", f"`{plain_type(field.type)}`", default, meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    keys = sorted(KERNEL_KEYS[kind])
    if keys:
        yield f"\nKeys that no options of this kind may define: {', '.join(f'`{key}`' for key in keys)}."


def option_rows(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """One row for each option; those of a nested model follow it."""
    model.model_rebuild()
    for name, field in model.model_fields.items():
        meaning = " ".join((field.description or "").split())
        default = "required" if field.is_required() else f"`{field.get_default(call_default_factory=True)!r}`"
        cells = (f"`{prefix}{name}`", f"`{option_type(field.annotation, field.metadata)}`", default, meaning)
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        for nested in nested_models(field.annotation):
            yield from option_rows(
                nested, f"{prefix}{name}.NAME." if nested is not field.annotation else f"{prefix}{name}."
            )


def nested_models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The options models that appear within an option's type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from nested_models(argument)


def component_lines(item: Provided) -> Iterator[str]:
    """One component that ships with milepost: its summary and its options."""
    yield f"\n### {item.kind} {item.name}\n"
    yield item.component.summary
    rows = list(option_rows(item.component.options))
    if rows:
        yield "\n| option | type | default | meaning |"
        yield "|---|---|---|---|"
        yield from rows


def shipped() -> list[Provided]:
    """Every component that ships with milepost, by kind and name."""
    records = Registry.load().plugins
    found = [item for record in records if record.distribution == "milepost" for item in record.components]
    return sorted(found, key=lambda item: (list(HOOKS.values()).index(item.kind), item.name))


def reference() -> str:
    """The reference for authors of plugins: every hook, trait and option."""
    lines = [REFERENCE]
    for hook in HOOKS:
        lines += hook_lines(hook)
    lines.append("\n## What ships with milepost")
    for item in shipped():
        lines += component_lines(item)
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


def pages() -> dict[str, str]:
    """File name and content of each generated page."""
    return {
        "configuration.md": configuration(),
        "metrics.md": METRICS + render_markdown(),
        "plugins/reference.md": reference(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a page is out of date")
    check = parser.parse_args(argv).check
    stale = []
    for name, content in pages().items():
        path = DOCS / name
        if check and (not path.exists() or path.read_text(encoding="utf-8") != content):
            stale.append(name)
        elif not check:
            path.write_text(content, encoding="utf-8")
    if stale:
        print(f"out of date: {', '.join(stale)}; run `make docs` and commit what it writes", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
