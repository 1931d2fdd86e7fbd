"""The Qwen3-4B recipes can be planned: their ranks, engines, steps, and a layout that fits into the GPUs they name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from milepost.config.loading import load_config
from milepost.config.plan import make_plan

EXAMPLES = Path(__file__).parents[2] / "examples"
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 23,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with what planning reads of Qwen3-4B: the shape in its config.json."""
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "ranks", "data_parallel", "steps", "critic"),
    [("qwen3-4b-grpo", 8, 4, 1, False), ("qwen3-4b-ppo", 4, 1, 2, True)],
)
def test_recipes_can_be_planned(
    model: Path, name: str, ranks: int, data_parallel: int, steps: int, critic: bool
) -> None:
    """GRPO: 8 GPUs / TP2, 32 x 8 = one step of 256. PPO: 4 GPUs / (PP2 x CP2), 8 x 8 = two steps of 32."""
    (model / "data.jsonl").write_text('{"prompt": "1+1", "label": "2", "reward_model": {"ground_truth": "2"}}\n')
    data = str(model / "data.jsonl")
    heldout = f"[{{name: aime24, path: {data}, label: label}}]"
    sets = [f"model.path={model}", f"data.path={data}", f"eval.datasets={heldout}"]
    plan = make_plan(load_config([EXAMPLES / f"{name}.yaml"], sets))
    assert (plan.world_size, plan.data_parallel, plan.steps_per_rollout, plan.needs_critic) == (
        ranks,
        data_parallel,
        steps,
        critic,
    )
    assert plan.transport.name == "ipc"
    assert not [warning for warning in plan.warnings if "memory" in warning or "GiB" in warning]


@pytest.mark.parametrize(("name", "ranks", "engines"), [("qwen3-4b-grpo", 2, 2), ("qwen3-4b-ppo", 4, 1)])
def test_their_twins_for_a_cpu_can_be_planned(tmp_path: Path, name: str, ranks: int, engines: int) -> None:
    model = tmp_path / "quickstart-4" / "model"
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(TINY))
    for data in ("train.jsonl", "heldout.jsonl"):
        (model.parent / data).write_text('{"prompt": "1+1", "label": "2"}\n')
    copy = shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("third-party"))
    plan = make_plan(load_config([copy / f"{name}.yaml", copy / "cpu" / f"{name}.yaml"]))
    assert (plan.world_size, plan.config.engine.num_engines) == (ranks, engines)
    assert (plan.config.engine.backend, plan.config.trainer.backend, plan.transport.name) == (
        "sglang",
        "megatron",
        "ipc",
    )
    assert plan.config.run.device == "cpu"
