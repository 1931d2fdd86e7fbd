"""The guide for authors: its examples run and keep every promise, and nothing is left without a word."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest
from milepost.components import KINDS, TRAITS
from milepost.discovery import HOOKS
from milepost.registry import use
from milepost.testing.plugins import Settings, check_records, plugins_at

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "plugins"
KIND_PAGES = {
    "algorithm": "algorithms.md",
    "advantage": "advantages.md",
    "reward": "rewards.md",
    "model": "models.md",
    "transport": "transports.md",
}
BLOCK = re.compile(r"^```python\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def registry_of_this_process() -> Iterator[None]:
    yield
    use(None)


def test_there_is_a_page_for_each_kind() -> None:
    assert set(KIND_PAGES) == set(KINDS) == set(HOOKS.values())
    index = (ROOT / "docs" / "plugins.md").read_text()
    for page in [*KIND_PAGES.values(), "reference.md", "hostile.md", "versioning.md"]:
        assert (PAGES / page).is_file()
        assert f"(plugins/{page})" in index


@pytest.mark.parametrize("kind", KIND_PAGES)
def test_a_pages_example_keeps_every_promise(kind: str, tmp_path: Path) -> None:
    blocks = BLOCK.findall((PAGES / KIND_PAGES[kind]).read_text())
    for path, source in blocks:
        file = tmp_path / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(source)
    (package,) = tmp_path.iterdir()
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\nname = "{package.name}"\nversion = "1.0"\n'
        f'[project.entry-points.milepost]\n{package.name} = "{package.name}"\n'
    )
    with plugins_at(tmp_path) as (registry, records):
        use(registry)
        plugin, component = check_records(records, Settings())
    assert (plugin.what, component.what) == (f"plugin {package.name}", f"{kind} {package.name}")
    assert [str(finding) for report in (plugin, component) for finding in report.findings] == []


def test_the_reference_names_every_hook_trait_and_option_with_its_meaning() -> None:
    page = (PAGES / "reference.md").read_text()
    for hook, kind in HOOKS.items():
        assert f"\n## {hook}\n" in page
        _, _, section = page.partition(f"\n### {TRAITS[kind].__name__}\n")
        for trait in TRAITS[kind].__dataclass_fields__:
            assert f"| `{trait}` |" in section.partition("\n## ")[0]
    generate = runpy.run_path(str(ROOT / "docs" / "generate.py"))
    for item in generate["shipped"]():
        assert f"\n### {item.kind} {item.name}\n" in page, f"run `make docs`: {item.kind} {item.name} is not there"
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert len(rows) > 40
    assert [row for row in rows if row.endswith("|  |")] == []
