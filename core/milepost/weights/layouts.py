"""What planning knows of a dense decoder-only model, read from its `config.json` in plain Python.

Serves Llama-like models: pre-norm blocks of attention (q, k, v, o) and a gated feed-forward (gate, up, down), RMS norms
with a weight, one embedding and one output head. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milepost.components import ModelLayout


def integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a positive integer of a `config.json`; a missing or null one is `default`.

    Raises ValueError, naming the key, if there is neither a value nor a default or the value is no positive integer.
    """
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise ValueError(f"config.json has no {key!r}; it is needed to know the model's size")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json has {key} = {value!r}, expected a positive integer")
    return value


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary parameters in the form of transformers 5: `rope_type`, `rope_theta` and what the type needs.

    Also reads the older form, where `rope_theta` and `rope_scaling` stand at the top. Raises ValueError if there is no
    `rope_theta` at all.
    """
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", config.get("rope_theta"))
    if not isinstance(parameters["rope_theta"], int | float):
        raise ValueError(f"config.json has rope_theta = {parameters['rope_theta']!r}, expected a number")
    parameters.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    return parameters


def attention_shape(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return (query heads, key-value heads, head dimension) with the defaults that transformers takes.

    Raises ValueError if the heads do not divide.
    """
    hidden_size, num_heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    num_kv_heads = integer(config, "num_key_value_heads", num_heads)
    if config.get("head_dim") is None and hidden_size % num_heads:
        raise ValueError(f"config.json has hidden_size {hidden_size} but {num_heads} heads and no head_dim")
    if num_heads % num_kv_heads:
        raise ValueError(f"config.json has {num_heads} heads, which {num_kv_heads} key-value heads do not divide")
    return num_heads, num_kv_heads, integer(config, "head_dim", hidden_size // num_heads)


def projection_biases(config: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Return whether (q, k and v), the attention output, and the feed-forward have biases."""
    attention = bool(config.get("attention_bias", False))
    qkv = attention or config.get("model_type") == "qwen2"
    return qkv, attention, bool(config.get("mlp_bias", False))


def has_qk_norm(config: Mapping[str, Any]) -> bool:
    """Return whether queries and keys are normalised per head, as in Qwen3."""
    return config.get("model_type") in {"qwen3", "qwen3_moe"}


def dense_layout(config: Mapping[str, Any]) -> ModelLayout:
    """Return the numbers of a Llama, Qwen2, Qwen3 or Mistral like model; the parameter count is exact for those.

    Raises ValueError naming a value that is missing, malformed or not of a dense model.
    """
    for key in ("num_experts", "num_local_experts"):
        if config.get(key):
            raise ValueError(f"config.json has {key} = {config[key]!r}; this recipe serves dense models only")
    hidden_size, intermediate_size = integer(config, "hidden_size"), integer(config, "intermediate_size")
    num_layers, vocab_size = integer(config, "num_hidden_layers"), integer(config, "vocab_size")
    num_heads, num_kv_heads, head_dim = attention_shape(config)
    qkv_bias, output_bias, mlp_bias = projection_biases(config)
    tied = bool(config.get("tie_word_embeddings", False))

    query, key_value = num_heads * head_dim, num_kv_heads * head_dim
    attention = hidden_size * (query + 2 * key_value) + query * hidden_size
    attention += (query + 2 * key_value) * qkv_bias + hidden_size * output_bias
    attention += 2 * head_dim * has_qk_norm(config)
    feed_forward = 3 * hidden_size * intermediate_size + (2 * intermediate_size + hidden_size) * mlp_bias
    block = attention + feed_forward + 2 * hidden_size
    embeddings = vocab_size * hidden_size * (1 if tied else 2)
    return ModelLayout(
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        num_parameters=num_layers * block + embeddings + hidden_size,
        tied_embeddings=tied,
        max_positions=integer(config, "max_position_embeddings"),
        feed_forward=intermediate_size,
        qk_norm=has_qk_norm(config),
    )


def dense_train_flops(layout: ModelLayout, length: int) -> float:
    """Return the floating-point operations of forward and backward over one sequence of `length` tokens.

    Six per parameter and token for the matrices (the embedding lookup costs nothing, the head does), and causal
    attention, where token t looks at t others: 6 x layers x heads x head_dim x length^2 (arXiv 2204.02311, appendix B,
    halved for the causal mask).
    """
    lookup = 0 if layout.tied_embeddings else layout.vocab_size * layout.hidden_size
    matrices = 6.0 * (layout.num_parameters - lookup) * length
    attention = 6.0 * layout.num_layers * layout.num_heads * layout.head_dim * float(length) ** 2
    return matrices + attention
