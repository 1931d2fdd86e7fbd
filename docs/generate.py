"""Write the pages of the guide that the code knows best: configuration.md and metrics.md.

python docs/generate.py            write them
python docs/generate.py --check    exit 1 if one is out of date, write nothing
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from milepost.config.schema import ComponentSection, RunConfig, Section
from milepost.tracking.catalogue import render_markdown
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


def pages() -> dict[str, str]:
    """File name and content of each generated page."""
    return {"configuration.md": configuration(), "metrics.md": METRICS + render_markdown()}


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
