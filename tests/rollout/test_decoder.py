"""The decoders' logits against transformers' own forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from local_helpers import CPU, GENERIC, LEAN, SIZES, make_decoder, make_model
from milepost.errors import MilepostError
from milepost.rollout.local.decoder import LeanDecoder
from milepost.rollout.local.hf_decoder import HFDecoder
from milepost.rollout.local.rope import inverse_frequencies
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

CASES = [pytest.param(LeanDecoder, config, id=f"lean-{name}") for name, config in LEAN.items()]
CASES += [pytest.param(HFDecoder, config, id=f"generic-{name}") for name, config in GENERIC.items()]
PROMPTS = [[5, 9, 11], [7, 3, 8, 20, 31, 40, 6, 9, 12], [50], [13, 14, 15, 16, 17]]


@torch.no_grad()
def plain(model: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits


@pytest.mark.parametrize(("kind", "config"), CASES)
def test_logits_equal_the_plain_forward_for_rows_of_different_lengths(kind: Any, config: dict[str, Any]) -> None:
    model = make_model(config)
    decoder = make_decoder(kind, model)
    decoder.allocate(4, 16)
    texts = [list(prompt) for prompt in PROMPTS]
    logits = decoder.prefill([0, 1, 2, 3], PROMPTS)
    for turn in range(12):
        expected = torch.stack([plain(model, text) for text in texts])
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
        tokens = [(17 * turn + 5 * row) % 61 for row in range(4)]
        positions = torch.tensor([len(text) for text in texts])
        decoder.allocate(4, int(positions.max()) + 1)  # grows on the way, keeping what is cached
        for text, token in zip(texts, tokens, strict=True):
            text.append(token)
        logits = decoder.step(torch.tensor(tokens), positions)


@pytest.mark.parametrize(("kind", "config"), CASES)
def test_rows_of_equal_length_and_copied_rows(kind: Any, config: dict[str, Any]) -> None:
    model = make_model(config)
    decoder = make_decoder(kind, model)
    decoder.allocate(3, 16)
    decoder.prefill([1], [[5, 9, 11]])
    decoder.copy_rows(torch.tensor([1, 1]), torch.tensor([0, 2]), 3)
    logits = decoder.step(torch.tensor([7, 8, 9]), torch.tensor([3, 3, 3]))
    expected = torch.stack([plain(model, [5, 9, 11, token]) for token in (7, 8, 9)])
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)


def test_a_step_of_fewer_rows_leaves_the_others_cache_alone() -> None:
    model = make_model(LEAN["qwen3-tied"])
    decoder = make_decoder(LeanDecoder, model)
    decoder.allocate(2, 16)
    decoder.prefill([0, 1], [[5, 9, 11], [7, 3]])
    decoder.step(torch.tensor([4]), torch.tensor([3]))
    logits = decoder.step(torch.tensor([6, 8]), torch.tensor([4, 2]))
    torch.testing.assert_close(logits[1], plain(model, [7, 3, 8]), rtol=0, atol=2e-5)
    torch.testing.assert_close(logits[0], plain(model, [5, 9, 11, 4, 6]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-untied-bias", "llama3-biases"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str) -> None:
    exact = make_model(LEAN[name])
    rounded = make_model(LEAN[name], torch.bfloat16)
    with torch.no_grad():
        for target, source in zip(rounded.parameters(), exact.parameters(), strict=True):
            target.copy_(source)
            source.copy_(target)  # both hold the same, rounded, weights
    decoder = LeanDecoder(exact.config.to_dict(), torch.bfloat16, CPU)
    decoder.load(list(exact.named_parameters()))
    decoder.finish_load()
    decoder.allocate(2, 16)
    decoder.prefill([0, 1], [[5, 9, 11], [7, 3]])
    logits = decoder.step(torch.tensor([4, 8]), torch.tensor([3, 2]))
    truth = torch.stack([plain(exact, [5, 9, 11, 4]), plain(exact, [7, 3, 8])])
    theirs = torch.stack([plain(rounded, [5, 9, 11, 4]), plain(rounded, [7, 3, 8])]).float()
    assert logits.dtype == torch.float32
    assert float((logits - truth).norm()) < 1.5 * float((theirs - truth).norm())


def test_weights_are_the_decoders_own_and_can_be_replaced() -> None:
    model = make_model(LEAN["qwen3-tied"])
    for kind in (LeanDecoder, HFDecoder):
        decoder = make_decoder(kind, model)
        decoder.allocate(1, 8)
        before = decoder.prefill([0], [[5, 9]])
        original = {name: value.detach().clone() for name, value in model.named_parameters()}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        torch.testing.assert_close(decoder.prefill([0], [[5, 9]]), before, rtol=0, atol=0)
        decoder.load(list(model.named_parameters()))
        decoder.finish_load()
        torch.testing.assert_close(decoder.prefill([0], [[5, 9]])[0], plain(model, [5, 9]), rtol=0, atol=2e-5)
        model.load_state_dict(original, strict=False)


@pytest.mark.parametrize("kind", [LeanDecoder, HFDecoder])
def test_incomplete_unknown_and_misshapen_tensors(kind: Any) -> None:
    model = make_model(LEAN["qwen3-untied-bias"])
    tensors = dict(model.named_parameters())
    decoder = kind(model.config.to_dict(), torch.float32, CPU)
    with pytest.raises(KeyError, match=r"no tensor 'model\.nothing'"):
        decoder.load([("model.nothing", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"'lm_head.weight' has shape \(3, 32\), expected \(61, 32\)"):
        decoder.load([("lm_head.weight", torch.zeros(3, 32))])
    late = tensors.pop("model.layers.1.mlp.up_proj.weight")
    decoder.load(list(tensors.items()))
    with pytest.raises(KeyError, match=r"misses model\.layers\.1\.mlp\.up_proj\.weight"):
        decoder.finish_load()
    with pytest.raises(RuntimeError, match="no complete weights"):
        decoder.prefill([0], [[1]])
    decoder.load([("model.layers.1.mlp.up_proj.weight", late)])
    decoder.finish_load()
    decoder.allocate(1, 8)
    torch.testing.assert_close(decoder.prefill([0], [[5, 9]])[0], plain(model, [5, 9]), rtol=0, atol=2e-5)
    decoder.unload()
    with pytest.raises(RuntimeError, match="no complete weights"):
        decoder.prefill([0], [[1]])


def test_a_tied_model_ignores_the_second_name_of_its_head() -> None:
    model = make_model(LEAN["qwen3-tied"])
    decoder = LeanDecoder(model.config.to_dict(), torch.float32, CPU)
    decoder.load(list(model.state_dict().items()))
    decoder.finish_load()
    decoder.allocate(1, 8)
    torch.testing.assert_close(decoder.prefill([0], [[5, 9]])[0], plain(model, [5, 9]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("name", ["llama3-biases", "llama-linear"])
def test_inverse_frequencies_equal_transformers(name: str) -> None:
    fields = dict(LEAN[name])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    expected, scaling = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config, CPU)
    assert scaling == 1.0
    torch.testing.assert_close(inverse_frequencies(config.to_dict()), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"use_sliding_window": True, "sliding_window": 8}, "sliding-window"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope_type 'yarn'"),
        ({"rope_theta": 1e4, "rope_parameters": {"partial_rotary_factor": 0.5}}, "only part of each head"),
        ({"num_experts": 8}, "num_experts = 8"),
    ],
)
def test_the_lean_decoder_refuses_what_it_cannot_serve(change: dict[str, Any], message: str) -> None:
    config = {"model_type": "qwen3", "head_dim": 8, "rope_theta": 1e4, **SIZES} | change
    with pytest.raises(ValueError, match=message):
        LeanDecoder(config, torch.float32, CPU)


def test_the_generic_decoder_refuses_layers_it_does_not_know() -> None:
    config = {"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"], **SIZES}
    with pytest.raises(ValueError, match="linear_attention"):
        HFDecoder(config, torch.float32, CPU)


def test_the_generic_decoder_finds_out_that_a_cache_does_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(LEAN["llama"])
    decoder = HFDecoder(model.config.to_dict(), torch.float32, CPU)
    decoder.load(list(model.named_parameters()))
    # A model that looks beyond what its mask allows.
    monkeypatch.setattr(decoder, "_masks", lambda positions, span: torch.zeros(len(positions), 1, 1, span))
    with pytest.raises(MilepostError, match="other logits with a cache"):
        decoder.finish_load()
