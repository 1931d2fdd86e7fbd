"""A whole run whose engine stands apart from its two ranks: weights are broadcast to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Command
from ray_cluster import ray_environment
from runs import numbers

pytestmark = pytest.mark.takes(25)

CONFIG: dict[str, Any] = {
    "run": {"threads": 1, "device": "cpu"},
    "model": {"path": "model"},
    "data": {"path": "train.jsonl", "chat_template": True},
    "rollout": {"num_rollouts": 3, "batch_size": 4, "samples_per_prompt": 4, "max_response_len": 8},
    "reward": {"name": "python", "function": "score:score"},
    "optimizer": {"lr": 1e-3},
    "cluster": {"launcher": "ray", "cpu_ranks": 2},
    "transport": {"verify": True},
}


def test_a_run_apart_gives_the_numbers_of_one_that_shares(policy: Path, ray_cluster: str, tmp_path: Path) -> None:
    for name in ("model", "train.jsonl"):
        (tmp_path / name).symlink_to(policy / name)
    reward = "def score(sample):\n    return sum(map(str.isdigit, sample.text)) / max(1, len(sample.text))\n"
    (tmp_path / "score.py").write_text(reward)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    apart = ("--set", "cluster.colocate=false", "--set", "transport.name=broadcast")
    for name, sets in {"apart": apart, "shared": ()}.items():  # the cluster has no room for both at once
        arguments = ["train", "run.yaml", "--no-progress", "--run-dir", name, *sets]
        code, output = Command(*arguments, cwd=tmp_path, environment=ray_environment(ray_cluster)).finish()
        assert code == 0, output
    expected = numbers(tmp_path / "shared")
    assert sum(line["kind"] == "step" for line in expected) == 3
    assert numbers(tmp_path / "apart") == expected
