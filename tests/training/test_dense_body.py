"""The written-out body of dense models: equal to transformers' own, hidden states and gradients, in float64."""

import pytest
import torch
from milepost.training import dense
from milepost.training.dense import DenseBody, add_batch_body
from milepost.weights.hf import take_apart
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
MODELS = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "qwen2, biases of q, k and v": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=False)),
    "llama, slowed rotation": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, rope_parameters=LLAMA3)),
}


def make(name: str, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype).eval()
    with torch.no_grad():  # transformers begins with norms of 1 and biases of 0, which would hide a wrong one
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.mark.parametrize("written_out", [256, 4], ids=["written-out attention", "library attention"])
@pytest.mark.parametrize("name", MODELS)
def test_hidden_states_and_gradients_are_the_librarys(
    name: str, written_out: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "WRITTEN_OUT", written_out)
    model = make(name)
    tokens = torch.randint(0, 31, (3, 13))  # the padding token among them
    upstream = torch.randn(3, 13, 24, dtype=torch.float64)
    expected = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    expected.backward(upstream)
    expected_gradients = gradients(model)
    hidden = DenseBody(model, model.config.to_dict())(tokens)
    hidden.backward(upstream)
    actual_gradients = gradients(model)
    # transformers computes norms and rotation in float32 whatever the model's dtype.
    torch.testing.assert_close(hidden, expected, rtol=2e-6, atol=2e-6)
    assert actual_gradients.keys() == expected_gradients.keys()
    for parameter, gradient in expected_gradients.items():
        error = (actual_gradients[parameter] - gradient).norm() / gradient.norm()
        assert error < 2e-6, f"{parameter}: {error}"


def test_gradients_against_finite_differences() -> None:
    model = make("qwen3")
    body = DenseBody(model, model.config.to_dict())
    tokens = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
    upstream = torch.randn(2, 4, 24, dtype=torch.float64)
    body(tokens).backward(upstream)
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        direction[0 if name.endswith("embed_tokens.weight") else len(direction) :] = 0.0  # the padding token's row
        sums = []
        with torch.no_grad():
            for step in (1e-6, -2e-6):
                parameter.add_(step * direction)
                sums.append(float((body(tokens) * upstream).sum()))
            parameter.add_(1e-6 * direction)
        assert parameter.grad is not None
        expected = (sums[0] - sums[1]) / 2e-6
        assert float((parameter.grad * direction).sum()) == pytest.approx(expected, rel=1e-5, abs=1e-6), name


def test_padding_on_the_right_changes_nothing() -> None:
    model = make("qwen3")
    body = DenseBody(model, model.config.to_dict())
    short, long = torch.tensor([[3, 1, 4, 1, 5]]), torch.tensor([[9, 2, 6, 5, 3, 5, 8]])
    both = torch.cat([torch.nn.functional.pad(short, (0, 2), value=7), long])
    hidden = body(both)
    torch.testing.assert_close(hidden[:1, :5], body(short))
    torch.testing.assert_close(hidden[1:], body(long))


def test_without_gradients_the_result_is_the_same_and_nothing_is_kept() -> None:
    model = make("qwen3", torch.float32)
    body = DenseBody(model, model.config.to_dict())
    tokens = torch.randint(0, 31, (2, 9))
    with torch.no_grad():
        hidden = body(tokens)
    assert hidden.grad_fn is None
    assert torch.equal(hidden, body(tokens))


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"use_sliding_window": True, "sliding_window": 8},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"model_type": "gemma3"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_it_would_not_compute_exactly_is_left_to_the_library(change: dict[str, object]) -> None:
    model = make("qwen3", torch.float32)
    config = model.config.to_dict()
    assert add_batch_body(take_apart(model), config).batch_body is not None
    assert add_batch_body(take_apart(model), config | change).batch_body is None


def test_16_bit_models_are_left_to_the_library() -> None:
    model = make("qwen3", torch.bfloat16)
    assert add_batch_body(take_apart(model), model.config.to_dict()).batch_body is None
