from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


def test_the_wheel_holds_the_kernel_and_the_plugins_and_nothing_else(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    plugins = {path.name for path in ROOT.glob("plugins/*/milepost_*") if (path / "__init__.py").is_file()}
    assert {"milepost_grpo", "milepost_deepscaler"} <= plugins
    with zipfile.ZipFile(wheel) as file:
        top = {name.split("/")[0] for name in file.namelist()}
    assert top == {"milepost", f"milepost-{project['version']}.dist-info", *plugins}


def test_the_wheel_declares_every_entry_point_and_holds_its_module(wheel: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (declared,) = [name for name in names if name.endswith(".dist-info/entry_points.txt")]
        parser = ConfigParser()
        parser.read_string(file.read(declared).decode())
    assert dict(parser["milepost"]) == project["entry-points"]["milepost"]
    for module in project["entry-points"]["milepost"].values():
        assert f"{module}/__init__.py" in names
    assert "milepost/py.typed" in names


def test_plugins_load_from_the_wheel_itself(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    entries = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["milepost"]
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from milepost.registry import Registry\n"
        "records = [record for record in Registry.load().plugins if record.distribution == 'milepost']\n"
        "print(*sorted(f'{record.name}={record.state}' for record in records))\n"
        f"for name in {['milepost', *sorted(entries.values())]!r}:\n"
        "    print(sys.modules[name].__file__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, *files = done.stdout.splitlines()
    assert first == " ".join(f"{name}=ok" for name in sorted(entries))
    assert files == [str(site / name / "__init__.py") for name in ("milepost", *sorted(entries.values()))]
