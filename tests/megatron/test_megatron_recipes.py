"""Recipes of dense families: what they read of `config.json`, what they refuse, and weights there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import CPU, Clip, make_batch, make_checkpoint, make_plan, make_tiny_schedule, plain_columns
from megatron_world import run_world
from milepost.errors import CheckpointError
from milepost.weights.dense import DenseMegatron
from safetensors.torch import load_file, save_file

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-5}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {"rope_parameters": LLAMA3, "max_position_embeddings": 64}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
}


def round_trip(rank: int, path: str, family: str, section: dict[str, Any]) -> None:
    from milepost.training.megatron.trainer import MegatronTrainer
    from milepost_llama.recipe import LlamaRecipe
    from milepost_qwen2.recipe import Qwen2Recipe
    from milepost_qwen3.recipe import Qwen3Recipe

    recipe: Any = {"llama": LlamaRecipe, "qwen2": Qwen2Recipe, "qwen3": Qwen3Recipe}[family]()
    plan = make_plan(Path(path), world=4, trainer=section)
    trainer = MegatronTrainer(plan, recipe=recipe, algorithm=Clip(), device=CPU, dtype=torch.float32)
    found = trainer.forward("actor", make_tiny_schedule(1, 1000), make_batch(), ("log_probs", "entropy"))
    source = trainer.source("actor")
    tensors = {name: tensor.clone() for name, tensor in source.tensors()}
    assert [(s.name, s.shape) for s in source.specs()] == [(k, tuple(t.shape)) for k, t in tensors.items()]
    pieces = list(source.shards())
    for shard in pieces:
        part = tensors[shard.name][tuple(slice(start, stop) for start, stop in shard.slices)]
        assert tuple(tensors[shard.name].shape) == shard.shape
        assert torch.equal(part, shard.view), shard.name
    if found:
        assert rank == 2, "the last stage's first tensor-parallel rank alone speaks"
        torch.save({"columns": found, "weights": tensors}, Path(path) / "found.pt")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_equals_transformers_and_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    family, changes = FAMILIES[name]
    path = make_checkpoint(tmp_path / "model", family, **changes)
    run_world(round_trip, 4, str(path), family, {"tensor_parallel": 2, "pipeline_parallel": 2})
    found = torch.load(path / "found.pt")
    model = AutoModelForCausalLM.from_pretrained(path)
    batch = make_batch()
    mask = batch["mask"]
    with torch.no_grad():
        expected = plain_columns(model, batch)
    for column in ("log_probs", "entropy"):
        torch.testing.assert_close(found["columns"][column][mask], expected[column][mask], atol=2e-5, rtol=0)
        assert not found["columns"][column][~mask].any()
    saved = load_file(path / "model.safetensors")
    assert found["weights"].keys() == saved.keys()
    assert all(torch.equal(found["weights"][key], saved[key]) for key in saved)


def load_fails(rank: int, path: str) -> str:
    from milepost.training.megatron.trainer import MegatronTrainer
    from milepost_qwen3.recipe import Qwen3Recipe

    try:
        MegatronTrainer(make_plan(Path(path)), recipe=Qwen3Recipe(), algorithm=Clip(), device=CPU, dtype=torch.float32)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def test_a_checkpoint_with_more_or_fewer_tensors_is_refused(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    file = path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}, file, {"format": "pt"})
    assert "'model.layers.0.self_attn.q_proj.bias'" in run_world(load_fails, 1, str(path))[0]
    del tensors["model.norm.weight"]
    save_file(tensors, file, {"format": "pt"})
    assert "has no tensor 'model.norm.weight'" in run_world(load_fails, 1, str(path))[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', expected 'silu'"),
        ({"attention_bias": True}, "attention_bias = true"),
        ({"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window = True"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type 'yarn'"),
        ({"attn_logit_cap": 30.0}, "attn_logit_cap = 30.0, which this recipe does not understand"),
        ({"model_type": "llama"}, "model_type = 'llama', expected 'qwen3'"),
        ({"num_experts": 8}, "num_experts = 8"),
    ],
)
def test_a_config_that_is_not_understood_is_an_error_that_names_it(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    config = json.loads((make_checkpoint(tmp_path / "model") / "config.json").read_text())
    described = DenseMegatron("qwen3").describe(config)
    assert (described.vocab_size, described.padded_vocab_size) == (61, 128)
    with pytest.raises(ValueError, match=message):
        DenseMegatron("qwen3").describe({**config, **change})
