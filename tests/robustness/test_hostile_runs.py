"""Runs that meet what users and machines do to them: one message, the right exit code, and nothing lost."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Command
from runs import lines

Write = Callable[..., Path]
pytestmark = pytest.mark.takes(40)

SLOW = '''
import pathlib, time

def score(sample):
    """One second a response while a file called `slow` lies in the folder."""
    if pathlib.Path(__file__).with_name("slow").exists():
        time.sleep(1.0)
    return 1.0

def fails(sample):
    raise ValueError("no score")
'''

NO_EVALUATION = {"interval": None, "datasets": []}


def start(path: Path, *flags: str) -> Command:
    return Command("train", path, "--no-progress", *flags, cwd=path.parent)


def finish(process: Command) -> tuple[int, str, str]:
    code, _ = process.finish()
    return code, process.stdout, checked(process.stderr)


def start_fresh(path: Path, **settings: Any) -> subprocess.Popen[str]:
    """Start a run as a shell does, with what `subprocess.Popen` can set."""
    return subprocess.Popen(
        [sys.executable, "-m", "milepost", "train", str(path), "--no-progress"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=path.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **settings,
    )


def checked(errors: str) -> str:
    assert not errors.startswith("Traceback") and "\nTraceback" not in errors, errors  # a reward's is indented
    return errors


def test_an_interrupted_last_evaluation_is_made_up_for(write_config: Write, workspace: Path) -> None:
    (workspace / "slow_score.py").write_text(SLOW)
    (workspace / "slow").touch()
    reward = {"name": "python", "function": "slow_score:score"}
    held_out = {"name": "heldout", "path": "heldout.jsonl", "reward": reward}
    path = write_config(rollout={"num_rollouts": 1}, eval={"interval": None, "before": False, "datasets": [held_out]})
    run_dir = workspace / "run"
    process = start(path)
    process.wait_until(lambda: len(lines(run_dir, "perf")) == 2)  # the second is written right before the evaluation
    process.send_signal(signal.SIGTERM)
    code, output, errors = finish(process)
    assert code == 130, errors
    assert "interrupted after 1 rollouts" in output
    assert "SIGTERM: finishing the current step and saving" in errors
    assert not (run_dir / "summary.json").exists()
    assert lines(run_dir, "eval") == []

    (workspace / "slow").unlink()
    code, output, errors = finish(start(path))
    assert code == 0, errors
    assert "resuming after rollout 0" in output
    assert [record["eval/heldout/accuracy"] for record in lines(run_dir, "eval")] == [1.0]
    assert json.loads((run_dir / "summary.json").read_text())["evaluations"] == {"heldout": [1.0, 1.0]}


def test_a_full_disk_is_one_message_and_the_run_goes_on_afterwards(write_config: Write, workspace: Path) -> None:
    path = write_config(rollout={"num_rollouts": 4}, eval=NO_EVALUATION)
    run_dir = workspace / "run"
    for size in (3000, 40_000):  # in the middle of the metrics, and of a checkpoint's tensors

        def small_files(limit: int = size) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

        process = start_fresh(path, preexec_fn=small_files)
        errors = checked(process.communicate(timeout=240)[1])
        assert process.returncode == 1, errors
        assert errors.count("error: ") == 1
        assert "File too large, so the run stopped; make room there." in errors
        assert not list((run_dir / "checkpoints").glob("rollout-*"))
    code, _, errors = finish(start(path))
    assert code == 0, errors
    assert [record["index"] for record in lines(run_dir, "rollout")] == [0, 1, 2, 3]
    assert [record["index"] for record in lines(run_dir, "step")] == [0, 1, 2, 3]


def test_a_reader_that_goes_away_ends_the_run_with_one_message(write_config: Write) -> None:
    path = write_config(rollout={"num_rollouts": 5000}, eval=NO_EVALUATION)
    process = start_fresh(path)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    assert process.wait(timeout=240) == 1
    assert errors.startswith("error: nobody reads stdout any more, so the run stopped")
    assert len(errors.splitlines()) == 1


def test_a_run_that_is_refused_leaves_the_folder_as_it_was(write_config: Write, workspace: Path) -> None:
    path = write_config(rollout={"num_rollouts": 1}, eval=NO_EVALUATION)
    assert finish(start(path))[0] == 0
    run_dir = workspace / "run"
    before = {name: (run_dir / name).read_bytes() for name in ("config.yaml", "provenance.json", "summary.json")}

    (workspace / "train.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n' * 8)
    code, _, errors = finish(start(path, "--set", "rollout.num_rollouts=2"))
    assert code == 2, errors
    assert errors.count("error: ") == 1
    assert {name: (run_dir / name).read_bytes() for name in before} == before

    # Without a checkpoint the folder is anybody's, and nothing of a finished run stays to be taken for this one's.
    (workspace / "slow_score.py").write_text(SLOW)
    for folder in sorted((run_dir / "checkpoints").rglob("*"), reverse=True):
        folder.rmdir() if folder.is_dir() else folder.unlink()
    code, _, errors = finish(start(path, "--set", "reward.function=slow_score:fails", "--set", "reward.on_error=null"))
    assert code == 1, errors
    assert "no score" in errors
    assert not (run_dir / "summary.json").exists()
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["reward"]["on_error"] is None


def test_a_run_folder_that_cannot_be_made_is_a_problem_of_the_run_config(write_config: Write) -> None:
    path = write_config()
    for name in ("/proc/nowhere/run", "x" * 300):
        code, output, errors = finish(start(path, "--run-dir", name))
        assert (code, output) == (2, ""), errors
        assert errors.startswith("error: 1 problem in the run config\n  run.dir: nothing can be written into ")
