"""The recipe `qwen3_moe`: sizes, operations, what it refuses, and its halves outside Megatron."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import milepost
import pytest
import torch
from milepost.components import ModelTraits
from milepost.config.memory import Cut, Load, stage_memory, stage_parameters
from milepost.weights.source import ModuleSource
from milepost_qwen3_moe import milepost_models
from milepost_qwen3_moe.layout import moe_layout, moe_train_flops
from milepost_qwen3_moe.megatron import Qwen3MoeMegatron
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "moe_intermediate_size": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    "pad_token_id": None,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3_moe")
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES))
    with torch.no_grad():  # routers begin so even that which experts are chosen would hardly matter
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def test_sizes_are_those_of_the_saved_model(folder: Path, config: dict[str, Any]) -> None:
    saved = load_file(folder / "model.safetensors")
    layout = moe_layout(config)
    assert layout.num_parameters == sum(tensor.numel() for tensor in saved.values())
    assert layout.expert_parameters == sum(t.numel() for name, t in saved.items() if ".experts." in name)
    assert (layout.num_experts, layout.feed_forward) == (4, 16)
    (component,) = milepost_models()
    assert isinstance(component.traits, ModelTraits)
    assert component.traits.architectures == ("Qwen3MoeForCausalLM",)


def test_operations_are_those_of_the_experts_that_a_token_visits(config: dict[str, Any]) -> None:
    layout = moe_layout(config)
    # 2 of 4 experts of 3 x 16 x 8 in each of 2 layers are not visited; the embedding's lookup costs nothing.
    visited = layout.num_parameters - 2 * 2 * 3 * 16 * 8 - 40 * 16
    assert moe_train_flops(layout, 10) == 6.0 * visited * 10 + 6.0 * 2 * 2 * 8 * 10**2


def test_memory_has_each_expert_whole_on_one_rank(config: dict[str, Any]) -> None:
    layout = moe_layout(config)
    experts = 2 * 4 * 3 * 16 * 8
    whole, halved = (stage_parameters(layout, Cut(data=4, expert=size), 0) for size in (1, 2))
    assert whole - halved == experts // 2
    # The optimizer's 12 bytes: experts are on 2 of 4 ranks, all else is on 4.
    state = stage_memory(layout, Cut(data=4, expert=2), Load(64, 2), 0).optimizer
    assert state == 12 * (halved - experts // 2) // 4 + 12 * experts // 2 // 2


def test_training_and_decoding_read_one_tensor_per_expert(folder: Path, config: dict[str, Any]) -> None:
    recipe = milepost.resolve("model", "qwen3_moe", {})
    loaded = recipe.hf.load(folder, torch.float32, CPU)
    saved = load_file(folder / "model.safetensors")
    source = dict(ModuleSource(loaded.model).tensors())
    assert source.keys() == saved.keys()
    assert all(torch.equal(source[name], saved[name]) for name in saved)
    decoder = recipe.hf.decoder(config, torch.float32, CPU)
    buffer = {name: tensor.clone() for name, tensor in saved.items()}
    for name, tensor in buffer.items():
        decoder.load([(name, tensor)])
        tensor.zero_()  # the sender's memory is the sender's again
    decoder.finish_load()
    decoder.allocate(1, 8)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([[5, 9, 11, 3]])).logits[0]
    torch.testing.assert_close(decoder.prefill([0], [[5, 9, 11]])[0], expected[2], atol=1e-5, rtol=1e-5)
    step = decoder.step(torch.tensor([3]), torch.tensor([3]))[0]
    torch.testing.assert_close(step, expected[3], atol=1e-5, rtol=1e-5)
    with pytest.raises(KeyError, match=r"experts\.4\."):
        decoder.load([("model.layers.0.mlp.experts.4.up_proj.weight", saved["lm_head.weight"])])


def test_an_expert_that_did_not_come_is_missed(folder: Path, config: dict[str, Any]) -> None:
    decoder = milepost.resolve("model", "qwen3_moe", {}).hf.decoder(config, torch.float32, CPU)
    saved = load_file(folder / "model.safetensors")
    decoder.load([item for item in saved.items() if item[0] != "model.layers.1.mlp.experts.3.down_proj.weight"])
    with pytest.raises(KeyError, match=r"misses model\.layers\.1\.mlp\.experts\.down_proj"):
        decoder.finish_load()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2, expected 1"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\], expected none"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok = 5, but only 4 experts"),
        ({"num_experts_per_tok": 1}, "num_experts_per_tok = 1 and norm_topk_prob = true"),
        ({"num_experts": 4, "num_local_experts": 8}, "num_experts = 4 and num_local_experts = 8"),
        ({"output_router_logits": True}, "asks for an auxiliary loss"),
        ({"expert_capacity_factor": 1.25}, "expert_capacity_factor = 1.25, which this recipe does not understand"),
        ({"moe_intermediate_size": None}, "no 'moe_intermediate_size'"),
        ({"model_type": "qwen3"}, "model_type = 'qwen3', expected 'qwen3_moe'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
)
def test_a_config_that_is_not_understood_is_an_error_that_names_it(
    config: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    assert Qwen3MoeMegatron().describe(config).transformer["num_moe_experts"] == 4
    with pytest.raises(ValueError, match=message):
        Qwen3MoeMegatron().describe({**config, **change})
