"""A run that is killed or interrupted, and goes on: the same numbers as if nothing had happened, bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import Command
from runs import logged, numbers

Write = Callable[..., Path]
pytestmark = pytest.mark.takes(30)


def start(path: Path, run_dir: str) -> Command:
    return Command("train", path, "--no-progress", "--run-dir", run_dir, cwd=path.parent)


@pytest.fixture
def undisturbed(write_config: Write) -> tuple[Path, list[dict[str, Any]]]:
    path = write_config(rollout={"num_rollouts": 6}, checkpoint={"save_interval": 2})
    code, output = start(path, "undisturbed").finish()
    assert code == 0, output
    return path, numbers(path.parent / "undisturbed")


def test_killed_and_interrupted_runs_go_on_with_the_same_numbers(
    undisturbed: tuple[Path, list[dict[str, Any]]],
) -> None:
    path, expected = undisturbed
    run_dir = path.parent / "killed"
    for kind, index in (("rollout", 0), ("step", 2), ("eval", 4)):  # before any save, between saves, after one
        process = start(path, "killed")
        process.wait_until(partial(logged, run_dir, kind, index))
        process.kill()
        process.finish()
    process = start(path, "killed")
    process.wait_until(lambda: logged(run_dir, "rollout", 4))
    process.send_signal(signal.SIGINT)
    code, output = process.finish()
    assert code == 130, output
    assert "finishing the current step and saving" in output
    assert "interrupted after" in output
    assert "Traceback" not in output
    code, output = start(path, "killed").finish()
    assert code == 0, output
    assert "resuming after rollout" in output
    assert numbers(run_dir) == expected


def test_one_run_folder_belongs_to_one_process(write_config: Write) -> None:
    path = write_config(rollout={"num_rollouts": 5000}, eval={"interval": None})
    first = start(path, "shared")
    first.wait_until(lambda: logged(path.parent / "shared", "rollout", 0))
    code, output = start(path, "shared").finish()
    first.kill()
    first.finish()
    assert code == 2, output
    assert "another process is running in" in output
    assert "Traceback" not in output
