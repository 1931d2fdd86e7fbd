"""A distribution of somebody else's: built, installed beside milepost's wheel, trained with, uninstalled, missed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import lines

pytestmark = pytest.mark.takes(25)

ROOT = Path(__file__).parents[2]


def run(*command: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment, cwd=cwd)


def pip(python: Path, *arguments: object) -> None:
    done = run(sys.executable, "-m", "pip", "--python", python, *arguments)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    for source in (ROOT, ROOT / "examples" / "third-party"):
        done = run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
        assert done.returncode == 0, done.stderr
    return {wheel.name.partition("-")[0]: wheel for wheel in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory, wheels: dict[str, Path]) -> Path:
    """A fresh environment's bin folder, with both wheels; what they depend on is borrowed from this environment."""
    folder = tmp_path_factory.mktemp("environment")
    done = run(sys.executable, "-m", "venv", "--without-pip", folder)
    assert done.returncode == 0, done.stderr
    (site,) = folder.glob("lib/python*/site-packages")
    # Lines of a .pth file are added behind the environment's own folder, and bring no .pth files along: an editable
    # milepost of this environment is not seen.
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for wheel in wheels.values():
        pip(folder / "bin" / "python", "install", "--no-deps", "--no-index", "--ignore-installed", "--quiet", wheel)
    return folder / "bin"


def test_from_the_wheel_to_a_training_and_back(environment: Path, write_config: Callable[..., Path]) -> None:
    milepost = environment / "milepost"
    listed = json.loads(run(milepost, "plugins", "list", "--json").stdout)["plugins"]
    (record,) = [record for record in listed if record["name"] == "road_signs"]
    assert (record["distribution"], record["version"], record["state"]) == ("road-signs", "1.0.0", "ok")
    assert [(one["kind"], one["name"]) for one in record["components"]] == [
        ("algorithm", "sapo"),
        ("advantage", "rank"),
        ("reward", "closeness"),
    ]

    config = write_config(
        rollout={"num_rollouts": 2},
        algorithm={"name": "sapo", "tau_negative": 1.1},
        advantage={"name": "rank"},
        checkpoint={"save_interval": 1},
        eval={"datasets": []},
    )
    # The reward of the shared config has options of its own, so it is replaced whole.
    config.write_text(
        config.read_text().replace("function: score:score", "scale: 5.0").replace("name: python", "name: closeness")
    )
    trained = run(milepost, "train", config, "--quiet")
    assert trained.returncode == 0, trained.stderr
    run_dir = config.parent / "run"
    # On policy nothing is held back.
    assert [line["train/gate"] for line in lines(run_dir, "step")] == [1.0, 1.0]
    rollouts = lines(run_dir, "rollout")
    assert all(0 <= line["rollout/reward/answered"] <= 1 and 0 <= line["rollout/raw_reward"] <= 1 for line in rollouts)

    pip(environment / "python", "uninstall", "--yes", "--quiet", "road-signs")
    missed = run(milepost, "train", config, "--quiet")
    assert missed.returncode == 2
    assert missed.stdout == ""
    assert "Traceback" not in missed.stderr
    # The estimator is looked for once the algorithm, whose own it may be, is known.
    assert "2 problems in the run config" in missed.stderr
    for kind, name in (("reward", "closeness"), ("algorithm", "sapo")):
        assert f"{kind}.name: unknown {kind} {name!r}; expected one of " in missed.stderr

    # With what is left the run does not go on as if nothing had happened.
    others = ["--set", "reward.name=python", "--set", "reward.function=score:score"]
    others += ["--set", "algorithm.name=grpo", "--set", "advantage.name=group", "--set", "rollout.num_rollouts=3"]
    refused = run(milepost, "train", config, "--quiet", *others)
    assert refused.returncode == 2
    assert "  road-signs: 1.0.0 there, absent here\n" in refused.stderr
    assert "--set checkpoint.allow_other_plugins=true" in refused.stderr
    resumed = run(milepost, "train", config, "--quiet", *others, "--set", "checkpoint.allow_other_plugins=true")
    assert resumed.returncode == 0, resumed.stderr
    assert "road-signs: 1.0.0 there, absent here" in resumed.stdout + resumed.stderr


def test_its_own_tests_pass() -> None:
    source = ROOT / "examples" / "third-party"
    done = run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
