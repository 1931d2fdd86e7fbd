"""Which build of torch the setup asks for, and what it does when there is none."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_setup() -> ModuleType:
    spec = importlib.util.spec_from_file_location("milepost_setup", ROOT / "scripts/setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


setup = load_setup()


@pytest.mark.parametrize(
    ("system", "has_gpu", "requirement"),
    [
        ("Linux", False, "torch==2.13.0+cpu"),
        ("Linux", True, "torch==2.13.0"),
        ("Darwin", False, "torch==2.13.0"),
        ("Windows", False, "torch==2.13.0"),
    ],
)
def test_linux_without_a_gpu_gets_the_cpu_build(system: str, has_gpu: bool, requirement: str) -> None:
    assert setup.torch_requirement("2.13.0", system, has_gpu) == requirement


def test_constraints_pin_torch() -> None:
    pinned = setup.pinned_torch((ROOT / "constraints.txt").read_text())
    assert (2, 11) <= tuple(map(int, pinned.split(".")[:2])) <= (2, 13)
    with pytest.raises(ValueError, match="torch==VERSION"):
        setup.pinned_torch("torch>=2.11\n")


@pytest.mark.parametrize(
    ("listing", "code", "found"), [("GPU 0: NVIDIA H200", 0, True), ("", 0, False), ("", 9, False)]
)
def test_a_gpu_is_one_that_nvidia_smi_lists(
    listing: str, code: int, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\necho '{listing}'\nexit {code}\n")
    program.chmod(0o755)
    assert setup.has_nvidia_gpu() is found


def test_a_torch_that_is_nowhere_stops_the_setup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two empty indexes: the setup must end, and must not try a requirement that a CUDA build would meet."""
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", empty.as_uri())
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    environment = setup.Environment.__new__(setup.Environment)
    environment.python = Path(sys.executable)
    monkeypatch.setattr(setup, "torch_requirement", lambda *_: "torch==0.0.1+cpu")
    with pytest.raises(SystemExit, match=r"torch==0\.0\.1\+cpu` failed"):
        environment.install_torch(empty.as_uri())


def test_help_says_what_it_does() -> None:
    command = [sys.executable, str(ROOT / "scripts/setup.py"), "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "--torch-index" in done.stdout
