import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from milepost.training.attention import ATTENTION, packed_attention
from milepost.training.packing import Layout
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 8},
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": 4},
    "gemma2": {"head_dim": 8, "sliding_window": 4, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, "sliding_window": 4},
    "olmo2": {},
    "phi": {"num_key_value_heads": 4},
    "gpt_neox": {},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "qwen3_moe": {
        "head_dim": 8,
        "moe_intermediate_size": 12,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    },
}
MIXED = (5, 17, 1, 9, 30, 17)


def make(name: str, attention: str, dtype: torch.dtype, **changes: int) -> nn.Module:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**(SMALL | MODELS[name] | changes), attn_implementation=attention)
    model: nn.Module = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "lengths",
    [MIXED, (12, 12, 12), (1,), (5, 200, 9, 195), (200, 195)],
    ids=["mixed", "equal", "one token", "long and short", "long"],
)
@pytest.mark.parametrize("name", MODELS)
def test_packed_models_equal_separate_forwards(name: str, lengths: tuple[int, ...]) -> None:
    # Gemma's norms are float32 whatever the model; capped scores exist in eager attention alone.
    tolerance = 1e-6 if name.startswith("gemma") else 1e-12
    plain_attention = "eager" if name == "gemma2" else "sdpa"
    packed_model, plain_model = make(name, ATTENTION, torch.float64), make(name, plain_attention, torch.float64)
    plain_model.load_state_dict(packed_model.state_dict())
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(0, 23, (1, length), generator=generator) for length in lengths]
    layout = Layout(lengths, CPU)

    packed = packed_model(
        input_ids=torch.cat(samples, 1), position_ids=layout.positions, use_cache=False, packing=layout
    ).logits[0]
    plain = torch.cat([plain_model(input_ids=sample, use_cache=False).logits[0] for sample in samples])
    packed.square().mean().backward()
    plain.square().mean().backward()

    torch.testing.assert_close(packed, plain, rtol=tolerance, atol=tolerance)
    for (key, left), right in zip(packed_model.named_parameters(), plain_model.parameters(), strict=True):
        torch.testing.assert_close(
            left.grad, right.grad, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: key + text
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_function_equals_attention_written_out(dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    total = sum(MIXED)
    query = torch.randn(1, 6, total, 5, generator=generator, dtype=torch.float64).to(dtype)
    key, value = torch.randn(2, 1, 2, total, 5, generator=generator, dtype=torch.float64).to(dtype)
    module = nn.Module()
    out, weights = packed_attention(
        module,
        query,
        key,
        value,
        None,
        scaling=0.4,
        sliding_window=window,
        softcap=softcap,
        packing=Layout(MIXED, CPU),
    )
    assert weights is None
    ids = torch.repeat_interleave(torch.arange(len(MIXED)), torch.tensor(MIXED))
    distance = torch.arange(total)[:, None] - torch.arange(total)
    allowed = (ids[:, None] == ids) & (distance >= 0) & (distance < (window or total))
    scores = query.double() @ key.double().repeat_interleave(3, 1).transpose(2, 3) * 0.4
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    expected = scores.masked_fill(~allowed, float("-inf")).softmax(-1) @ value.double().repeat_interleave(3, 1)
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(out.double(), expected.transpose(1, 2), rtol=tolerance, atol=tolerance)


def test_gradients_of_mixed_lengths_are_true() -> None:
    layout = Layout((3, 14, 1, 6), CPU)
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 2, 24, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, 1, 24, 3, generator=generator, dtype=torch.float64, requires_grad=True) for _ in "kv")

    def function(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return packed_attention(nn.Module(), query, key, value, None, packing=layout)[0]

    assert len(layout.buckets) > 1
    assert torch.autograd.gradcheck(function, (query, key, value))


def test_what_it_cannot_do_is_an_error() -> None:
    x = torch.zeros(1, 2, 3, 4)
    layout = Layout((3,), CPU)
    for arguments, message in [
        ({}, "called without a layout"),
        ({"packing": layout, "attention_mask": x}, "gave an attention mask"),
        ({"packing": layout, "dropout": 0.1}, "asks for dropout 0.1"),
        ({"packing": layout, "s_aux": x}, "asks for 's_aux'"),
        ({"packing": layout, "is_causal": False}, "attends to later tokens"),
        ({"packing": Layout((4,), CPU)}, "expected one packed row of 4 tokens"),
    ]:
        call = {"attention_mask": None, **arguments}
        with pytest.raises(ValueError, match=message):
            packed_attention(nn.Linear(1, 1), x, x, x, **call)


@pytest.mark.parametrize("lengths", [(256,) * 16, tuple(range(241, 272, 2))], ids=["equal", "ragged"])
def test_sixteen_times_256_packed_cost_at_most_1_3_times_sixteen_forwards(lengths: tuple[int, ...]) -> None:
    """The claim is about cost, so it is measured: processor time, the median of rounds taken in turns.

    Attention over the whole row would take sixteen times that of its samples, and most of the model's time.
    """
    assert sum(lengths) == 4096
    models = [make("qwen3", attention, torch.float32, max_position_embeddings=512) for attention in (ATTENTION, "sdpa")]
    samples = [torch.randint(0, 23, (1, length)) for length in lengths]
    row, layout = torch.cat(samples, 1), Layout(lengths, CPU)

    def packed() -> None:
        models[0](input_ids=row, position_ids=layout.positions, use_cache=False, packing=layout).logits.sum().backward()

    def separate() -> None:
        for sample in samples:
            models[1](input_ids=sample, use_cache=False).logits.sum().backward()

    def seconds(run: Callable[[], None]) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    packed()
    assert statistics.median(seconds(packed) / seconds(separate) for _ in range(7)) <= 1.3
