"""What may be imported where: the light half stays light, and nothing imports upwards."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "core"
PLUGINS = sorted(path for path in ROOT.glob("plugins/*/milepost_*") if (path / "__init__.py").is_file())
ENTRY_POINTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
    "milepost"
]
HEAVY = ("torch", "numpy", "ray", "transformers", "sglang", "megatron", "tokenizers", "safetensors")

WITHOUT_HEAVY = f"""
import sys
for name in {HEAVY!r}:
    sys.modules[name] = None   # importing it raises ImportError
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plugins_load_without_the_heavy_libraries() -> None:
    code = f"""{WITHOUT_HEAVY}
import milepost
assert "pydantic" not in sys.modules, "importing milepost alone is to import next to nothing"
for name in milepost.__all__:
    getattr(milepost, name)
from milepost.registry import Registry
for record in Registry.load().plugins:
    if record.distribution == "milepost":
        print(record.name, record.state, record.traceback or record.error)
"""
    assert sorted(run(code).splitlines()) == sorted(f"{name} ok " for name in ENTRY_POINTS)


@pytest.mark.parametrize("module", sorted(ENTRY_POINTS.values()))
def test_an_entry_point_module_is_light(module: str) -> None:
    run(f"{WITHOUT_HEAVY}\nimport {module}")


def test_config_and_plan_are_light() -> None:
    names = [f"milepost.config.{path.stem}" for path in sorted((CORE / "milepost/config").glob("[a-z]*.py"))]
    assert {"milepost.config.schema", "milepost.config.plan"} <= set(names)
    run(f"{WITHOUT_HEAVY}\nimport importlib\nfor name in {names!r}:\n    importlib.import_module(name)")


def test_listing_plugins_imports_only_what_it_needs() -> None:
    # This is what keeps `milepost plugins list` within three times the import of pluggy and pydantic.
    code = """
import sys
from click.testing import CliRunner
from milepost.cli.plugins import plugins
before = set(sys.modules)
assert CliRunner().invoke(plugins, ["list"], catch_exceptions=False).exit_code == 0
print(*[name for name in ("importlib.metadata", "milepost.config.schema", "yaml", "torch") if name in sys.modules])
"""
    assert run(code) == "\n"


def imports(file: Path, *, deferred: bool) -> Iterator[str]:
    """Yield the absolute names a file imports outside `if TYPE_CHECKING`; with `deferred` also inside functions."""
    parts = file.relative_to(CORE if file.is_relative_to(CORE) else file.parents[1]).with_suffix("").parts
    package = parts[:-1]

    def walk(node: ast.AST) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) and not deferred:
                continue
            if isinstance(child, ast.Import):
                yield from (alias.name for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = [*package[: len(package) + 1 - child.level]] if child.level else []
                module = ".".join([*base, *([child.module] if child.module else [])])
                for alias in child.names:
                    inner = CORE / Path(*module.split("."), alias.name)
                    is_module = inner.is_dir() or inner.with_suffix(".py").is_file()
                    yield f"{module}.{alias.name}" if is_module else module
            else:
                yield from walk(child)

    yield from walk(ast.parse(file.read_text()))


KERNEL = CORE / "milepost"
KERNEL_FILES = sorted(KERNEL.rglob("*.py"))


def room_of(file: Path) -> str:
    """The room of the kernel that a file belongs to: a module or a package right below `milepost`."""
    return file.relative_to(KERNEL).parts[0].removesuffix(".py")


MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "alarm": set(),
    "entry_points": set(),
    "components": set(),
    "hookspecs": {"components"},
    "discovery": {"alarm", "components", "entry_points", "errors", "hookspecs"},
    "registry": {"components", "discovery", "entry_points", "errors", "hookspecs"},
    "config": {"components", "discovery", "entry_points", "errors", "hookspecs", "registry"},
    "functional": {"components", "errors"},
    "samples": {"errors"},
}
"""Rooms at the bottom, and the rooms below them. `import milepost` itself is allowed: it imports lazily."""

ABOVE_ALL = {"cli", "loop", "run"}
"""Rooms that nothing outside them may import."""


@pytest.mark.parametrize("room", sorted(MAY_IMPORT))
def test_nothing_at_the_bottom_imports_upwards(room: str) -> None:
    files = [file for file in KERNEL_FILES if room_of(file) == room]
    assert files, f"there is no room {room}; take it out of MAY_IMPORT"
    allowed = MAY_IMPORT[room] | {room}
    wrong = [
        f"{file.relative_to(CORE)} imports {name}"
        for file in files
        for name in imports(file, deferred=True)
        if name.startswith("milepost.") and name.split(".")[1] not in allowed
    ]
    assert wrong == []


def test_nothing_imports_what_stands_above_it() -> None:
    wrong = []
    for file in KERNEL_FILES:
        for name in imports(file, deferred=True):
            above = name.split(".")[1] if name.startswith("milepost.") else ""
            if above in ABOVE_ALL and room_of(file) not in ABOVE_ALL | {"__main__"}:
                wrong.append(f"{file.relative_to(CORE)} imports {name}")
    assert wrong == []


def test_there_is_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for file in KERNEL_FILES:
        name = ".".join(file.relative_to(CORE).with_suffix("").parts).removesuffix(".__init__")
        graph[name] = {other for other in imports(file, deferred=False) if other.startswith("milepost.")}
    finished: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"import cycle: {' -> '.join([*trail[trail.index(name) :], name])}"
        if name not in finished:
            for other in graph.get(name, ()):
                visit(other, (*trail, name))
            finished.add(name)

    for name in graph:
        visit(name, ())


def test_the_kernel_knows_no_plugin() -> None:
    names = {path.name for path in PLUGINS}
    assert {"milepost_grpo", "milepost_deepscaler"} <= names
    wrong = [
        f"{file.relative_to(CORE)} imports {name}"
        for file in KERNEL_FILES
        for name in imports(file, deferred=True)
        if name.split(".")[0] in names
    ]
    assert wrong == []


def test_a_plugin_reaches_others_only_through_the_registry() -> None:
    names = {path.name for path in PLUGINS}
    wrong = [
        f"{file.relative_to(ROOT)} imports {name}"
        for plugin in PLUGINS
        for file in plugin.rglob("*.py")
        for name in imports(file, deferred=True)
        if name.split(".")[0] in names - {plugin.name}
    ]
    assert wrong == []


def test_every_plugin_folder_has_an_entry_point() -> None:
    assert sorted(path.name for path in PLUGINS) == sorted(value.split(":")[0] for value in ENTRY_POINTS.values())
