import pytest
import torch
from milepost.training.norms import rms_norm, speed_up_norms
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

SMALL = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def test_by_hand() -> None:
    # mean of squares 12.5, and 12.5 to go to 25
    out = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), 12.5)
    torch.testing.assert_close(out, torch.tensor([[0.6, 8.0]]))


def test_gradcheck() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, weight: rms_norm(x, weight, 1e-3), (x, weight))


def test_a_model_computes_the_same_with_faster_norms() -> None:
    torch.manual_seed(0)
    plain, fast = (Qwen3ForCausalLM(Qwen3Config(**SMALL)) for _ in range(2))
    fast.load_state_dict(plain.state_dict())
    assert speed_up_norms(fast) == 9  # in each of two layers two, one for queries and one for keys; the last
    tokens = torch.randint(0, 13, (2, 9))
    outputs = [model(tokens).logits for model in (plain, fast)]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-6)
    for output in outputs:
        output.square().mean().backward()
    for left, right in zip(fast.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_keep_the_original(dtype: torch.dtype) -> None:
    model = Qwen3ForCausalLM(Qwen3Config(**SMALL)).to(dtype)
    norm = model.model.norm
    x = torch.randn(2, 16, dtype=dtype)
    before = norm(x)
    speed_up_norms(model)
    assert torch.equal(norm(x), before)


def test_norms_of_another_kind_are_left_alone() -> None:
    assert speed_up_norms(Gemma2ForCausalLM(Gemma2Config(**SMALL))) == 0
