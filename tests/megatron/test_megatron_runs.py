"""`milepost train` with Megatron ranks on Ray gives the numbers of the torch trainer in one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Command
from ray_cluster import ray_environment
from runs import numbers

pytestmark = pytest.mark.takes(75)

CONFIG: dict[str, Any] = {
    "run": {"threads": 1, "device": "cpu"},
    "model": {"path": "model"},
    "data": {"path": "train.jsonl", "chat_template": True},
    "rollout": {"num_rollouts": 3, "batch_size": 4, "samples_per_prompt": 4, "max_response_len": 16},
    "reward": {"name": "python", "function": "score:score"},
    # Adam makes the sign of a gradient of nothing but rounding a whole step; plain SGD keeps it what it is.
    "optimizer": {"name": "sgd", "lr": 0.2},
    "trainer": {"max_tokens_per_gpu": 128},
}
MEGATRON = ("cluster.launcher=ray", "trainer.backend=megatron")
GRPO = ("algorithm.name=grpo", "algorithm.kl_loss_coef=0.01", "cluster.cpu_ranks=2", "trainer.tensor_parallel=2")
PPO = ("algorithm.name=ppo", "cluster.cpu_ranks=4", "trainer.pipeline_parallel=2", "trainer.context_parallel=2")


def train(folder: Path, run_dir: str, cluster: str, *sets: str) -> list[dict[str, Any]]:
    """Run to the end and return every line of metrics.jsonl without wall-clock times."""
    flags = [word for item in sets for word in ("--set", item)]
    command = ["train", "run.yaml", "--no-progress", "--run-dir", run_dir, *flags]
    code, output = Command(*command, cwd=folder, environment=ray_environment(cluster)).finish()
    assert code == 0, output
    return numbers(folder / run_dir)


def parallel(sets: tuple[str, ...]) -> tuple[str, ...]:
    """The settings that one process of the torch trainer has no use for."""
    return tuple(item for item in sets if item.startswith(("cluster.", "trainer.")))


@pytest.mark.parametrize("sets", [GRPO, PPO], ids=["grpo-tp2", "ppo-pp2-cp2"])
def test_megatron_ranks_learn_what_the_torch_trainer_learns(
    policy: Path, tmp_path: Path, ray_cluster: str, sets: tuple[str, ...]
) -> None:
    (tmp_path / "train.jsonl").symlink_to(policy / "train.jsonl")
    shutil.copytree(policy / "model", tmp_path / "model")
    # transformers gives the embedding of a padding token no gradient, also where the policy sampled that token.
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"pad_token_id": None}))
    reward = "def score(sample):\n    return sum(map(str.isdigit, sample.text)) / max(1, len(sample.text))\n"
    (tmp_path / "score.py").write_text(reward)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    torch = train(tmp_path, "torch", ray_cluster, *(item for item in sets if item not in parallel(sets)))
    megatron = train(tmp_path, "megatron", ray_cluster, *MEGATRON, *sets)
    assert [(line["kind"], line["index"]) for line in megatron] == [(line["kind"], line["index"]) for line in torch]
    for mine, theirs in zip(megatron, torch, strict=True):
        # What the engine and the trainer disagree on is rounding alone, and so is not the same rounding.
        rounding = {"train/log_prob_diff", "train/log_prob_diff_max"}
        compared = [name for name in theirs if name not in rounding | {"kind"}]
        assert mine.keys() == theirs.keys()
        assert [mine[name] for name in compared] == pytest.approx(
            [theirs[name] for name in compared], rel=1e-4, abs=1e-5
        )
        assert all(mine[name] < 1e-4 for name in rounding & mine.keys())
