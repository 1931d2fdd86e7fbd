"""The generated pages of the guide are those the code would write."""

from __future__ import annotations

import runpy
from pathlib import Path

from milepost.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[1]


def test_generated_pages_are_up_to_date() -> None:
    for name, content in runpy.run_path(str(ROOT / "docs/generate.py"))["pages"]().items():
        written = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert written == content, f"docs/{name} is out of date: run `make docs` and commit what it writes"


def test_every_field_is_explained() -> None:
    page = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    for name, field in RunConfig.model_fields.items():
        _, _, section = page.partition(f"\n## {name}\n")
        assert isinstance(field.annotation, type)
        for key, inner in field.annotation.model_fields.items():
            row = next(line for line in section.splitlines() if line.startswith(f"| `{key}` |"))
            assert inner.description
            assert " ".join(inner.description.split()).replace("|", "\\|") in row
