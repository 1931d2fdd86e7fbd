"""Tiny models and engines for the tests of the local engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import torch
from milepost.recipe import Decoder
from milepost.rollout.engine import SamplingParams
from milepost.rollout.local import LocalEngine
from milepost.rollout.local.decoder import LeanDecoder
from milepost.rollout.local.hf_decoder import HFDecoder
from milepost.samples import Sample, Task
from transformers import AutoConfig, AutoModelForCausalLM

T = TypeVar("T")
CPU = torch.device("cpu")
VOCAB = 61
END = 2

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": END,
    "pad_token_id": 0,
    "bos_token_id": None,
}
LEAN = {
    "qwen3-tied": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True, **SIZES},
    "qwen3-untied-bias": {"model_type": "qwen3", "head_dim": 8, "attention_bias": True, **SIZES},
    "qwen3-one-kv-head": {"model_type": "qwen3", "head_dim": 8, **SIZES, "num_key_value_heads": 1},
    "qwen2": {"model_type": "qwen2", **SIZES},
    "llama": {"model_type": "llama", **SIZES, "num_key_value_heads": 4},
    "llama3-biases": {
        "model_type": "llama",
        "rope_parameters": LLAMA3_ROPE,
        "attention_bias": True,
        "mlp_bias": True,
        **SIZES,
    },
    "llama-linear": {
        "model_type": "llama",
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
        **SIZES,
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, **SIZES},
}
GENERIC = {
    "llama": LEAN["llama3-biases"],
    "gpt2": {
        "model_type": "gpt2",
        "vocab_size": VOCAB,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 128,
        "eos_token_id": END,
        "bos_token_id": None,
    },
    "mistral-window": {"model_type": "mistral", "sliding_window": 6, **SIZES},
    "gemma2-mixed-softcap": {
        "model_type": "gemma2",
        "head_dim": 8,
        "query_pre_attn_scalar": 8,
        "sliding_window": 6,
        "final_logit_softcapping": 3.0,
        **SIZES,
    },
}


def make_model(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """Return a transformers model with weights that make lively, well-conditioned logits; norms and biases differ."""
    fields = dict(config)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields), dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.25)
    return model.eval()


def make_decoder(kind: type[LeanDecoder] | type[HFDecoder], model: Any) -> Decoder:
    """Return a decoder with the model's weights."""
    decoder = kind(model.config.to_dict(), torch.float32, CPU)
    decoder.load(list(model.named_parameters()))
    decoder.finish_load()
    return decoder


def decode(ids: Sequence[int]) -> str:
    """Token 3 is `a`, 4 is `b` and so on; what comes before has no text."""
    return "".join(chr(ord("a") + (token - 3) % 26) for token in ids if token >= 3)


def make_engine(model: Any, decoder: Decoder | None = None, **settings: Any) -> LocalEngine:
    """Return an engine that will serve the model's weights once `serving` has pushed them."""
    decoder = decoder or LeanDecoder(model.config.to_dict(), torch.float32, CPU)
    return LocalEngine(
        decoder=decoder, decode=decode, **{"end_token_ids": (END,), "max_positions": 128, "name": "test"} | settings
    )


def push(engine: LocalEngine, model: Any, version: int = 0) -> None:
    """Give the engine the model's weights."""
    engine.fence()
    engine.load(list(model.named_parameters()))
    engine.serve(version)


def run(engine: LocalEngine, model: Any, act: Callable[[], Awaitable[T]]) -> T:
    """Start the engine with the model's weights, do something, and stop it whatever happens."""

    async def main() -> T:
        await engine.start()
        try:
            push(engine, model)
            return await act()
        finally:
            await engine.stop()

    return asyncio.run(asyncio.wait_for(main(), 60))


def ask(engine: LocalEngine, prompt: Sequence[int], params: SamplingParams, key: Sequence[int] = (0,)) -> Any:
    """Return the coroutine of one request."""
    return engine.generate(Task(index=0, prompt="", tokens=tuple(prompt)), prompt, params, key)


@torch.no_grad()
def reference_log_probs(model: Any, sample: Sample, temperature: float = 1.0) -> torch.Tensor:
    """Return the log-prob of each token after the first, by one plain forward in float64."""
    ids = torch.from_numpy(sample.tokens).long()[None]
    logits = model(ids).logits[0].double() / temperature
    return logits[:-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
