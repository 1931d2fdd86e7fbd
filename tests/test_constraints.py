"""The pinned versions, for CPUs and for GPUs, are ones that milepost's own requirements allow."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from milepost import doctor
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def pins(name: str) -> dict[str, str]:
    lines = [line.strip() for line in (ROOT / name).read_text().splitlines()]
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-gpu.txt"])
def test_pins_are_within_the_required_ranges(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    required = [Requirement(text) for group in groups for text in group]
    pinned = pins(name)
    checked = [requirement for requirement in required if requirement.name in pinned]
    assert {"torch", "transformers"} <= {requirement.name for requirement in checked}
    for requirement in checked:
        assert requirement.specifier.contains(pinned[requirement.name]), (requirement, pinned[requirement.name])


def test_gpu_pins_are_the_versions_that_doctor_calls_tested() -> None:
    pinned = pins("constraints-gpu.txt")
    assert {name: pinned[name] for name in doctor.TESTED} == dict(doctor.TESTED)
