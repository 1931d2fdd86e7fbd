"""Sizes and floating-point operations read from `config.json`, against transformers' own models."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from milepost.weights.layouts import attention_shape, dense_layout, dense_train_flops, rope_parameters
from transformers import AutoConfig, AutoModelForCausalLM

BASE = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 77,
}
CONFIGS = {
    "qwen3": {"model_type": "qwen3", "head_dim": 16, **BASE},
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, **BASE},
    "qwen3-bias": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True, **BASE},
    "qwen2": {"model_type": "qwen2", **BASE},
    "llama": {"model_type": "llama", **BASE},
    "llama-tied-biases": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        **BASE,
    },
    "llama-full-heads": {"model_type": "llama", **BASE, "num_key_value_heads": None},
    "mistral": {"model_type": "mistral", **BASE},
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_parameter_counts_are_exact_for_saved_checkpoints(config: dict[str, Any], tmp_path: Path) -> None:
    fields = dict(config)
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(made)
    made.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    layout = dense_layout(saved)
    assert layout.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert layout.tied_embeddings == made.tie_word_embeddings
    assert (layout.num_layers, layout.hidden_size, layout.vocab_size, layout.max_positions) == (3, 48, 101, 77)
    assert (layout.num_heads, layout.num_kv_heads) == (6, made.num_key_value_heads)
    query = dict(model.named_parameters())["model.layers.0.self_attn.q_proj.weight"]
    assert layout.num_heads * layout.head_dim == query.shape[0]
    assert rope_parameters(saved)["rope_theta"] == made.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("config", "count"),
    [
        (
            {
                "model_type": "qwen3",
                "vocab_size": 151936,
                "hidden_size": 2560,
                "intermediate_size": 9728,
                "num_hidden_layers": 36,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "max_position_embeddings": 40960,
                "tie_word_embeddings": True,
            },
            4_022_468_096,  # Qwen/Qwen3-4B
        ),
        (
            {
                "model_type": "llama",
                "vocab_size": 128256,
                "hidden_size": 4096,
                "intermediate_size": 14336,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
                "max_position_embeddings": 131072,
                "rope_theta": 500000.0,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            },
            8_030_261_248,  # meta-llama/Llama-3.1-8B
        ),
    ],
)
def test_parameter_counts_of_published_models(config: dict[str, Any], count: int) -> None:
    assert dense_layout(config).num_parameters == count


def test_train_flops_are_three_times_what_a_forward_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    fields = dict(CONFIGS["qwen3-tied"])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    layout, length = dense_layout(CONFIGS["qwen3-tied"]), 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    # An eager forward multiplies out the masked half of attention too; norms count as parameters and not as products.
    half = 2 * layout.num_layers * layout.num_heads * layout.head_dim * length**2
    norms = layout.num_layers * (2 * 48 + 2 * 16) + 48
    rotary = 2 * (layout.head_dim // 2) * length
    forward = counter.get_total_flops() - rotary - half + 2 * norms * length
    assert dense_train_flops(layout, length) == 3 * forward


def test_defaults_and_the_older_form_of_rope() -> None:
    assert attention_shape({"hidden_size": 64, "num_attention_heads": 4}) == (4, 4, 16)
    assert attention_shape({"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}) == (
        4,
        2,
        32,
    )
    old = rope_parameters({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}})
    assert (old["rope_type"], old["rope_theta"], old["factor"]) == ("linear", 5e5, 4.0)
    new = rope_parameters({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}})
    assert (new["rope_type"], new["rope_theta"]) == ("default", 1e6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"vocab_size": "many"}, "vocab_size = 'many', expected a positive integer"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_key_value_heads": 4}, "6 heads, which 4 key-value heads do not divide"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
    ],
)
def test_malformed_values_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dense_layout(CONFIGS["llama"] | change)


def test_layouts_import_no_torch() -> None:
    code = "import milepost.weights.layouts, sys; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)
