"""A run that is killed or interrupted, and goes on: the same numbers as if nothing had happened, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Write = Callable[..., Path]


def start(path: Path, run_dir: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "milepost", "train", str(path), "--no-progress", "--run-dir", run_dir]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=path.parent, env=environment
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def wait_for(process: subprocess.Popen[str], run_dir: Path, kind: str, index: int) -> None:
    """Wait until the run has logged a line of this kind and index."""
    deadline = time.monotonic() + 120
    metrics = run_dir / "metrics.jsonl"
    needle = f'"kind": "{kind}", "index": {index},'
    while not (metrics.exists() and needle in metrics.read_text()):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def numbers(run_dir: Path) -> list[dict[str, Any]]:
    """Every line of metrics.jsonl without wall-clock times."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in record.items() if not k.startswith("perf/") and k != "time"} for record in records]


@pytest.fixture
def undisturbed(write_config: Write) -> tuple[Path, list[dict[str, Any]]]:
    path = write_config(rollout={"num_rollouts": 6}, checkpoint={"save_interval": 2})
    code, output = finish(start(path, "undisturbed"))
    assert code == 0, output
    return path, numbers(path.parent / "undisturbed")


def test_killed_and_interrupted_runs_go_on_with_the_same_numbers(
    undisturbed: tuple[Path, list[dict[str, Any]]],
) -> None:
    path, expected = undisturbed
    run_dir = path.parent / "killed"
    for kind, index in (("rollout", 0), ("step", 2), ("eval", 4)):  # before any save, between saves, after one
        process = start(path, "killed")
        wait_for(process, run_dir, kind, index)
        process.kill()
        finish(process)
    process = start(path, "killed")
    wait_for(process, run_dir, "rollout", 4)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 130, output
    assert "finishing the current step and saving" in output
    assert "interrupted after" in output
    assert "Traceback" not in output
    code, output = finish(start(path, "killed"))
    assert code == 0, output
    assert "resuming after rollout" in output
    assert numbers(run_dir) == expected


def test_one_run_folder_belongs_to_one_process(write_config: Write) -> None:
    path = write_config(rollout={"num_rollouts": 5000}, eval={"interval": None})
    first = start(path, "shared")
    wait_for(first, path.parent / "shared", "rollout", 0)
    code, output = finish(start(path, "shared"))
    first.kill()
    finish(first)
    assert code == 2, output
    assert "another process is running in" in output
    assert "Traceback" not in output
