"""A run that was begun in one process goes on with two tensor-parallel ranks, and can be exported."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Command
from runs import numbers

pytestmark = pytest.mark.takes(35)

CONFIG: dict[str, Any] = {
    "run": {"threads": 1, "device": "cpu"},
    "model": {"path": "model"},
    "data": {"path": "train.jsonl", "chat_template": True},
    "rollout": {"num_rollouts": 2, "batch_size": 4, "samples_per_prompt": 4, "max_response_len": 8},
    "reward": {"name": "python", "function": "score:score"},
    # Adam makes the sign of a gradient of nothing but rounding a whole step; plain SGD keeps it what it is.
    "optimizer": {"name": "sgd", "lr": 0.2},
    "trainer": {"max_tokens_per_gpu": 128},
}
REWARD = "def score(sample):\n    return sum(map(str.isdigit, sample.text)) / max(1, len(sample.text))\n"


def milepost(folder: Path, *words: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    code, output = Command(*words, cwd=folder, environment=environment).finish()
    assert code == 0, output


def train(folder: Path, run_dir: str, *sets: str) -> None:
    flags = [word for item in sets for word in ("--set", item)]
    milepost(folder, "train", "run.yaml", "--no-progress", "--run-dir", run_dir, *flags)


def test_a_run_resumes_on_another_layout(policy: Path, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").symlink_to(policy / "train.jsonl")
    shutil.copytree(policy / "model", tmp_path / "model")
    # transformers gives the embedding of a padding token no gradient, also where the policy sampled that token.
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    (tmp_path / "score.py").write_text(REWARD)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    train(tmp_path, "whole")
    train(tmp_path, "run", "trainer.backend=megatron", "rollout.num_rollouts=1")
    tp2 = ("cluster.launcher=ray", "cluster.cpu_ranks=2", "trainer.tensor_parallel=2")
    train(tmp_path, "run", "trainer.backend=megatron", *tp2)
    expected, found = (
        {(line["kind"], line["index"]): line for line in numbers(tmp_path / name)} for name in ("whole", "run")
    )
    assert found.keys() == expected.keys()
    for key, line in expected.items():
        names = [name for name in line if name != "kind" and "log_prob_diff" not in name]
        assert [found[key][name] for name in names] == pytest.approx([line[name] for name in names], rel=1e-4, abs=1e-5)
    milepost(tmp_path, "export", "run", "out")
    milepost(tmp_path, "export", "whole", "expected")

    from safetensors.torch import load_file

    theirs, mine = (load_file(tmp_path / name / "model.safetensors") for name in ("expected", "out"))
    assert mine.keys() == theirs.keys()
    assert max(float((mine[name] - theirs[name]).abs().max()) for name in theirs) < 1e-5
