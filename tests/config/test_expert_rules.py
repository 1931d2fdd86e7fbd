"""Planning rules of models with experts: how expert parallelism divides experts and ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from milepost.config.loading import load_config
from milepost.config.plan import Plan, make_plan
from milepost.errors import ConfigError

MODEL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def plan(folder: Path, **trainer: object) -> Plan:
    """Plan a run of 6 experts on 8 ranks."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(MODEL))
    (folder / "data.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    config = {
        "model": {"path": "model"},
        "data": {"path": "data.jsonl"},
        "rollout": {"num_rollouts": 1, "batch_size": 8, "samples_per_prompt": 8, "max_response_len": 16},
        "reward": {"name": "deepscaler"},
        "trainer": {"backend": "megatron", "steps_per_rollout": 1, **trainer},
        "cluster": {"launcher": "ray", "cpu_ranks": 8},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    return make_plan(load_config([folder / "run.yaml"]))


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ({"expert_parallel": 4}, "4 does not divide 6 experts"),
        ({"expert_parallel": 3}, "3 does not divide the 8 ranks of a pipeline stage"),
        ({"expert_parallel": 2, "tensor_parallel": 2}, "needs it under tensor parallelism; set it to true"),
    ],
)
def test_a_layout_that_experts_do_not_allow_is_refused(
    tmp_path: Path, trainer: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(tmp_path, **trainer)


@pytest.mark.parametrize(
    "trainer",
    [
        {"expert_parallel": 2},
        {"expert_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True},
        {"expert_parallel": 2, "pipeline_parallel": 4},
    ],
)
def test_a_layout_that_they_allow_is_planned(tmp_path: Path, trainer: dict[str, object]) -> None:
    assert plan(tmp_path, **trainer).layout.num_experts == 6
