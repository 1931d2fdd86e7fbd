"""The recipes `qwen3` and `generic`: what they load, decode with and tell the plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import milepost
import pytest
import torch
from milepost.components import ModelTraits
from milepost.errors import CheckpointError
from milepost.rollout.local.decoder import LeanDecoder
from milepost.rollout.local.hf_decoder import HFDecoder
from milepost.training.packing import Layout
from milepost.weights.hf import load_causal_lm, take_apart
from milepost_generic.layout import generic_layout
from transformers import AutoConfig, AutoModelForCausalLM

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}


def save(config: dict[str, Any], folder: Path) -> Any:
    fields = dict(config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).float().eval()
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("recipe", "config", "kind"),
    [
        ("qwen3", {"model_type": "qwen3", "tie_word_embeddings": True, **SIZES}, LeanDecoder),
        ("qwen3", {"model_type": "qwen3", **SIZES}, LeanDecoder),
        ("generic", {"model_type": "llama", **SIZES}, HFDecoder),
        ("generic", GPT2, HFDecoder),
    ],
)
def test_a_checkpoint_loads_and_decodes(recipe: str, config: dict[str, Any], kind: type, tmp_path: Path) -> None:
    original = save(config, tmp_path)
    built = milepost.resolve("model", recipe, {})
    assert recipe == "qwen3" or built.megatron is None
    loaded = built.hf.load(tmp_path, torch.float32, CPU)
    assert loaded.model.config._attn_implementation == "milepost_packed"
    ids = torch.tensor([[5, 9, 11, 3, 7]])
    with torch.no_grad():
        expected = original(ids).logits[0]
        layout = Layout((5,), CPU)
        hidden = loaded.body(
            input_ids=ids, position_ids=layout.positions, use_cache=False, packing=layout
        ).last_hidden_state
        torch.testing.assert_close(loaded.head(hidden)[0], expected, rtol=0, atol=1e-5)
    assert loaded.head.weight.shape == (40, 16)

    decoder = built.hf.decoder(json.loads((tmp_path / "config.json").read_text()), torch.float32, CPU)
    assert isinstance(decoder, kind)
    decoder.load(list(loaded.model.named_parameters()))
    decoder.finish_load()
    decoder.allocate(1, 8)
    torch.testing.assert_close(decoder.prefill([0], [ids[0].tolist()])[0], expected[-1], rtol=0, atol=1e-5)


def test_scale_and_softcap_give_the_models_own_logits(tmp_path: Path) -> None:
    for config in (
        {"model_type": "gemma2", "query_pre_attn_scalar": 8, "final_logit_softcapping": 0.3, **SIZES},
        {"model_type": "cohere", "logit_scale": 0.25, **SIZES},
        {"model_type": "granite", "logits_scaling": 4.0, **SIZES},
    ):
        original = save(config, tmp_path)
        parts = take_apart(original)
        ids = torch.tensor([[5, 9, 11, 3]])
        with torch.no_grad():
            logits = parts.head(parts.body(input_ids=ids).last_hidden_state) * parts.logit_scale
            if parts.softcap is not None:
                logits = parts.softcap * (logits / parts.softcap).tanh()
            torch.testing.assert_close(logits, original(ids).logits, rtol=0, atol=1e-6)
        assert (parts.logit_scale, parts.softcap) != (1.0, None)


def test_nothing_is_downloaded(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no folder .*/missing"):
        load_causal_lm(tmp_path / "missing", torch.float32, CPU)


def test_a_model_in_one_piece_is_refused() -> None:
    fields = {key: value for key, value in GPT2.items() if key != "model_type"}
    body = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **fields)).transformer
    with pytest.raises(ValueError, match="GPT2Model has no separate body and output head"):
        take_apart(body)


def test_traits_serve_the_plan() -> None:
    from milepost_generic import milepost_models as generic
    from milepost_qwen3 import milepost_models as qwen3

    (of_qwen3,), (of_generic,) = qwen3(), generic()
    assert isinstance(of_qwen3.traits, ModelTraits) and isinstance(of_generic.traits, ModelTraits)
    assert of_qwen3.traits.architectures == ("Qwen3ForCausalLM",)
    assert of_generic.traits.architectures == ("*",)
    assert "slower" in of_generic.summary


def test_the_generic_layout_reads_other_names() -> None:
    layout = generic_layout(GPT2)
    assert (layout.num_layers, layout.hidden_size, layout.num_heads, layout.head_dim) == (2, 16, 2, 8)
    assert layout.max_positions == 32
    llama = {"model_type": "llama", **SIZES}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    assert generic_layout(llama).num_parameters == sum(parameter.numel() for parameter in model.parameters())


def test_the_generic_layout_counts_experts() -> None:
    moe = {**SIZES, "num_experts": 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **moe))
    layout = generic_layout({"model_type": "qwen3_moe", **moe})
    assert layout.num_experts == 4
    assert layout.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    mixtral = {**SIZES, "num_local_experts": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("mixtral", **mixtral))
    layout = generic_layout({"model_type": "mixtral", **mixtral})
    assert layout.num_parameters == sum(parameter.numel() for parameter in model.parameters())
