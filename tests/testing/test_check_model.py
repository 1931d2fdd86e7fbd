"""The model checks: recipes that keep their promises pass, and every way of breaking one is caught by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import milepost
import pytest
import torch
from milepost.components import ModelTraits
from milepost.recipe import HFModel
from milepost.rollout.local.decoder import LeanDecoder
from milepost.rollout.local.hf_decoder import HFDecoder
from milepost.testing import check_model
from milepost.testing.checkpoints import config_of, tiny_config
from milepost.weights.hf import load_causal_lm
from milepost.weights.layouts import dense_layout, dense_train_flops

TRAITS = ModelTraits(("Qwen3ForCausalLM",), dense_layout, dense_train_flops)


class Half:
    """A sound hf half of Qwen3 that others here break in one place each."""

    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> HFModel:
        return load_causal_lm(path, dtype, device)

    def decoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
        return LeanDecoder(config, dtype, device)


class Rounded(Half):
    """Loads in bfloat16 on the way."""

    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> HFModel:
        loaded = load_causal_lm(path, torch.bfloat16, device)
        loaded.model.float()
        return loaded


class Scaled(Half):
    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> HFModel:
        return replace(super().load(path, dtype, device), logit_scale=1.1)


class Leaking(Half):
    """Attention that sees across the samples of a row."""

    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> HFModel:
        loaded = load_causal_lm(path, dtype, device, attention="sdpa")
        inner = loaded.body

        class Body(torch.nn.Module):
            def forward(self, packing: Any = None, **inputs: Any) -> Any:
                mask = torch.ones_like(inputs["input_ids"])
                return inner(**inputs, attention_mask=mask)

        return replace(loaded, body=Body())


class Renamed(Half):
    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> HFModel:
        loaded = super().load(path, dtype, device)
        wrapped = torch.nn.Module()
        wrapped.add_module("inner", loaded.model)
        return replace(loaded, model=wrapped)


class Failing(Half):
    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> HFModel:
        raise RuntimeError("no such file")


class OddDecoder(LeanDecoder):
    """One position too far in every step."""

    def step(self, tokens: Any, positions: Any) -> Any:
        return super().step(tokens, positions + 1)


class StaleDecoder(LeanDecoder):
    """Keeps the head it was first given."""

    head: Any = None

    def load(self, tensors: Any) -> None:
        kept = []
        for name, tensor in tensors:
            if name == "model.norm.weight":
                self.head = tensor.clone() if self.head is None else self.head
                tensor = self.head
            kept.append((name, tensor))
        super().load(kept)


class TolerantDecoder(LeanDecoder):
    """Takes what it can get."""

    def load(self, tensors: Any) -> None:
        super().load([(name, tensor) for name, tensor in tensors if name != "no.such.tensor"])


class DriftingDecoder(LeanDecoder):
    """Adds a little to what comes first."""

    def load(self, tensors: Any) -> None:
        if tensors and tensors[0][0] != "model.embed_tokens.weight":
            tensors = [(name, tensor + 1e-7) for name, tensor in tensors]
        super().load(tensors)


def with_decoder(kind: type) -> Half:
    half = Half()
    half.decoder = lambda config, dtype, device: kind(config, dtype, device)  # type: ignore[method-assign]
    return half


def recipe(half: Half, megatron: Any = None) -> Any:
    return SimpleNamespace(hf=half, megatron=megatron)


def found(half: Half, traits: ModelTraits = TRAITS, megatron: Any = None) -> set[tuple[str, str]]:
    return {(finding.promise, finding.case) for finding in check_model(recipe(half, megatron), traits=traits)}


QWEN = "a tiny Qwen3ForCausalLM"


def test_sound_recipes_pass() -> None:
    assert check_model(recipe(Half()), traits=TRAITS) == []
    generic = with_decoder(HFDecoder)
    assert check_model(recipe(generic), traits=TRAITS) == []
    tied = {**config_of("Qwen3ForCausalLM"), "tie_word_embeddings": True, "num_key_value_heads": 32}
    assert check_model(recipe(Half()), traits=TRAITS, config=tied) == []


@pytest.mark.parametrize(
    ("half", "promise"),
    [
        (Failing(), "hf half loads"),
        (Rounded(), "bit-exact load"),
        (Scaled(), "the model's own logits"),
        (Leaking(), "packed equals separate"),
        (Renamed(), "weights under the checkpoint's names"),
        (with_decoder(OddDecoder), "decoder log-probs"),
        (with_decoder(StaleDecoder), "new weights"),
        (with_decoder(TolerantDecoder), "incomplete weights are refused"),
        (with_decoder(DriftingDecoder), "bit-exact weight round trip"),
    ],
    ids=["load", "rounded", "scaled", "leaking", "renamed", "odd", "stale", "tolerant", "drifting"],
)
def test_a_broken_half_is_found(half: Half, promise: str) -> None:
    promises = {promise for promise, _ in found(half)}
    assert promise in promises, promises


def wrong_count(config: Mapping[str, Any]) -> Any:
    layout = dense_layout(config)
    return replace(layout, num_parameters=layout.num_parameters + 1)


def guessing(config: Mapping[str, Any]) -> Any:
    return dense_layout({"hidden_size": 32, "num_hidden_layers": 2, **config})


@pytest.mark.parametrize(
    ("traits", "promise", "case"),
    [
        (replace(TRAITS, layout=wrong_count), "layout", QWEN),
        (replace(TRAITS, layout=guessing), "layout names what is missing", f"{QWEN}, config.json without hidden_size"),
        (
            replace(TRAITS, layout=lambda config: dense_layout(dict(config)) if config["num_hidden_layers"] else None),
            "layout names what is missing",
            f"{QWEN}, config.json without num_hidden_layers",
        ),
        (replace(TRAITS, train_flops=lambda layout, length: 6.0), "training FLOPs", f"{QWEN}, 100 and 200 tokens"),
        (replace(TRAITS, megatron=True), "megatron half", "the traits"),
    ],
)
def test_traits_that_are_not_true_are_found(traits: ModelTraits, promise: str, case: str) -> None:
    assert (promise, case) in found(Half(), traits)


def test_a_conversion_that_loses_something_is_found() -> None:
    real = milepost.resolve("model", "qwen3", {}).megatron
    assert real is not None

    class Forgetful:
        def describe(self, config: Mapping[str, Any]) -> Any:
            described = real.describe(config)
            return replace(described, conversions=described.conversions[1:])

    promises = found(Half(), replace(TRAITS, megatron=True), Forgetful())
    assert promises == {("megatron conversions", QWEN)}
    assert found(Half(), replace(TRAITS, megatron=True), real) == set()


def test_a_recipe_without_traits_and_an_unknown_architecture_say_what_to_do() -> None:
    with pytest.raises(ValueError, match="pass traits=ModelTraits"):
        check_model(recipe(Half()))
    with pytest.raises(ValueError, match=r"transformers has no NoSuchForCausalLM.*--config config\.json"):
        check_model(recipe(Half()), traits=replace(TRAITS, architectures=("NoSuchForCausalLM",)))


def test_a_tiny_config_keeps_the_family() -> None:
    tiny = tiny_config(config_of("Gemma3ForCausalLM"))
    assert set(tiny["layer_types"]) == {"sliding_attention", "full_attention"}
    assert (tiny["num_hidden_layers"], tiny["hidden_size"], tiny["vocab_size"]) == (2, 32, 96)
