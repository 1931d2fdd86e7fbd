"""The order of the test files, and what tests of whole runs share: a tiny policy, made by the quickstart's own code."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray_cluster import started

ROOT = Path(__file__).parents[1]

REWARD = '''
def score(sample):
    """The share of digits in the response: every response has some, so there is always a spread to learn from."""
    return sum(letter.isdigit() for letter in sample.text) / max(1, len(sample.text))
'''


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "takes(seconds): how long this file takes on two idle cores; the longest go first"
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first: one that is begun last would be waited for by all other workers."""
    seconds = {item.path: mark.args[0] for item in items if (mark := item.get_closest_marker("takes"))}
    items.sort(key=lambda item: -seconds.get(item.path, 0))


@pytest.fixture(scope="session")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, `train.jsonl` and `heldout.jsonl`: a Qwen3 of two layers that hardly does sums."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # the workers share one
    out = folder / "policy"
    maker = ROOT / "examples" / "quickstart" / "make.py"
    settings = ["--hidden", "32", "--layers", "2", "--steps", "40", "--threads", "1"]
    with (folder / "policy.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():  # the maker's folder is complete or absent
            subprocess.run([sys.executable, str(maker), "--out", str(out), *settings], check=True, capture_output=True)
    return out


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Address of a Ray cluster with room for four ranks, for runs that need none of their own."""
    with started() as address:
        yield address


@pytest.fixture
def workspace(policy: Path, tmp_path: Path) -> Path:
    """A folder of a test's own with the policy, its problems, and a reward beside the run config."""
    (tmp_path / "model").symlink_to(policy / "model")
    shutil.copy(policy / "train.jsonl", tmp_path)
    held_out = (policy / "heldout.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "heldout.jsonl").write_text("".join(held_out[:20]))
    (tmp_path / "score.py").write_text(REWARD)
    return tmp_path


SMALL_RUN: dict[str, Any] = {
    "run": {"dir": "run", "threads": 1, "device": "cpu"},
    "model": {"path": "model"},
    "data": {"path": "train.jsonl", "chat_template": True},
    "rollout": {"num_rollouts": 4, "batch_size": 4, "samples_per_prompt": 4, "max_response_len": 16},
    "reward": {"name": "python", "function": "score:score"},
    "optimizer": {"lr": 1e-3},
    "checkpoint": {"save_interval": 1},
    "eval": {"interval": 2, "datasets": [{"name": "heldout", "path": "heldout.jsonl"}]},
}


def merged(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Return `base` with nested changes put in."""
    result = dict(base)
    for key, value in changes.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result


@pytest.fixture
def write_config(workspace: Path) -> Callable[..., Path]:
    """Write a run config of four small rollouts into the workspace, changed by keyword sections."""

    def write(**sections: Any) -> Path:
        path = workspace / "run.yaml"
        path.write_text(yaml.safe_dump(merged(SMALL_RUN, sections)))
        return path

    return write
