"""The examples that build on the quickstart can be planned as their first lines say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from milepost.config.loading import load_config
from milepost.config.plan import make_plan

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The examples beside what `make.py` would have made, of which planning reads this much."""
    for path in EXAMPLES.glob("*.yaml"):
        (tmp_path / "examples").mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / "examples")
    for name, layers in (("quickstart", 3), ("quickstart-4", 4)):
        (tmp_path / name / "model").mkdir(parents=True)
        config = {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "vocab_size": 23,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
        }
        (tmp_path / name / "model" / "config.json").write_text(json.dumps(config))
        for data in ("train.jsonl", "heldout.jsonl"):
            (tmp_path / name / data).write_text('{"prompt": "1+1", "label": "2"}\n')
    return tmp_path / "examples"


@pytest.mark.parametrize(
    ("names", "ranks", "critic"),
    [
        (("quickstart",), 1, False),
        (("quickstart", "ppo"), 1, True),
        (("quickstart", "gspo"), 1, False),
        (("quickstart", "rloo"), 1, False),
        (("quickstart", "megatron"), 2, False),
        (("quickstart", "ppo", "megatron-ppo"), 4, True),
    ],
)
def test_examples_can_be_planned(folder: Path, names: tuple[str, ...], ranks: int, critic: bool) -> None:
    plan = make_plan(load_config([folder / f"{name}.yaml" for name in names]))
    assert (plan.world_size, plan.needs_critic) == (ranks, critic)
    assert plan.run_dir == folder.parent / "runs" / (names[-1])
