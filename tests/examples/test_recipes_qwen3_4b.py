"""The Qwen3-4B recipes can be planned: their ranks, engines, steps, and a layout that fits into the GPUs they name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from milepost.config.loading import load_config
from milepost.config.plan import make_plan

EXAMPLES = Path(__file__).parents[2] / "examples"


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
