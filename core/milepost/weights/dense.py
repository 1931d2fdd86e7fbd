"""The Megatron half that dense decoder-only recipes share: Llama, Qwen2, Qwen3.

Everything is read from `config.json`. A key that is not known here, or a value that would change what the model
computes and is not served, is an error that names it: a checkpoint is never trained as something it is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F

from milepost.recipe import MegatronModel
from milepost.rollout.local.rope import inverse_frequencies
from milepost.weights.conversion import Conversion, Part
from milepost.weights.layouts import dense_layout, has_qk_norm, integer, projection_biases

VOCAB_MULTIPLE = 128
"""The vocabulary is padded to a multiple of this on every layout, so that checkpoints reshard without a remainder."""

READ_KEYS = frozenset(
    {
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"),
        *("rope_theta", "rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "model_type"),
        *("num_experts", "num_local_experts"),
    }
)
"""Keys that decide what the model computes, all of them read."""

IRRELEVANT_KEYS = frozenset(
    {
        *("architectures", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "auto_map"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "initializer_range", "pretraining_tp"),
        *("max_window_layers", "return_dict", "output_attentions", "output_hidden_states", "is_encoder_decoder"),
        *("id2label", "label2id", "problem_type", "chunk_size_feed_forward", "_attn_implementation_autoset"),
        *("transformers.js_config", "is_llama_config", "rope_interleaved", "quantization_config"),
    }
)
"""Keys that change nothing of what the model computes; some only at the values that `REQUIRED` names."""

REQUIRED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, 0.0),
    "use_sliding_window": (False,),
    "rope_interleaved": (False,),
    "quantization_config": (None,),
}
"""Keys with the only values that are served; a missing or null one is fine."""


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the key, if a `config.json` has something a dense model here does not understand."""
    for key, values in REQUIRED.items():
        if config.get(key) is not None and config[key] not in values:
            raise ValueError(f"config.json has {key} = {config[key]!r}, expected {values[0]!r}; train it with torch")
    layer_types = set(config.get("layer_types") or ())
    if layer_types - {"full_attention"}:
        raise ValueError(f"config.json has layer_types {sorted(layer_types)}, expected full_attention throughout")
    if config.get("sliding_window") and config.get("use_sliding_window", True) is not False:
        raise ValueError(f"config.json has sliding_window = {config['sliding_window']!r}; train it with torch")
    known = READ_KEYS | IRRELEVANT_KEYS | REQUIRED.keys() | {"layer_types", "sliding_window"}
    unknown = sorted(key for key, value in config.items() if key not in known and value is not None)
    if unknown:
        raise ValueError(
            f"config.json has {unknown[0]} = {config[unknown[0]]!r}, which this recipe does not understand; remove it "
            "if it does not change what the model computes, else train it with torch or write a recipe"
        )


class DenseMegatron:
    """Implements `milepost.recipe.MegatronHalf` for one family of dense Llama-like models.

    What is peculiar to a family (norms of q and k, biases of q, k and v) follows from its `model_type`.
    """

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type

    def describe(self, config: Mapping[str, Any]) -> MegatronModel:
        """Read a `config.json`. Raises ValueError naming a value that is missing, malformed or not understood."""
        if config.get("model_type") != self.model_type:
            raise ValueError(f"config.json has model_type = {config.get('model_type')!r}, expected {self.model_type!r}")
        check_config(config)
        layout = dense_layout(config)
        qkv_bias, output_bias, mlp_bias = projection_biases(config)
        if output_bias or mlp_bias:
            key = "attention_bias" if output_bias else "mlp_bias"
            raise ValueError(f"config.json has {key} = true, expected false; train it with torch")
        qk_norm = has_qk_norm(config)
        inner = integer(config, "intermediate_size")
        padded = -(-layout.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        return MegatronModel(
            transformer={
                "num_layers": layout.num_layers,
                "hidden_size": layout.hidden_size,
                "num_attention_heads": layout.num_heads,
                "num_query_groups": layout.num_kv_heads,
                "kv_channels": layout.head_dim,
                "ffn_hidden_size": inner,
                "layernorm_epsilon": float(config.get("rms_norm_eps", 1e-6)),
                "normalization": "RMSNorm",
                "qk_layernorm": qk_norm,
                "activation_func": F.silu,
                "gated_linear_unit": True,
                "add_bias_linear": False,
                "add_qkv_bias": qkv_bias,
            },
            layer_spec=dense_layer_spec,
            conversions=tuple(dense_conversions(config)),
            vocab_size=layout.vocab_size,
            padded_vocab_size=padded,
            tied_embeddings=layout.tied_embeddings,
            max_positions=layout.max_positions,
            inverse_frequencies=inverse_frequencies(config),
        )


def dense_layer_spec(config: Any) -> Any:
    """Return Megatron's layer of its own modules, with milepost's attention and norms, for a TransformerConfig."""
    from milepost.training.megatron.layers import layer_spec

    return layer_spec(config)


def dense_conversions(config: Mapping[str, Any]) -> list[Conversion]:
    """Return the rules of a dense model's tensors."""
    layout = dense_layout(config)
    hidden, inner = layout.hidden_size, integer(config, "intermediate_size")
    padded = -(-layout.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    layer, source = "decoder.layers.{layer}.", "model.layers.{layer}."

    def vocab(megatron: str, name: str) -> Conversion:
        return Conversion(megatron, (Part(name, (layout.vocab_size, hidden)),), split=0, padded=padded)

    def direct(megatron: str, name: str, *shape: int, split: int | None = None) -> Conversion:
        return Conversion(layer + megatron, (Part(source + name, shape),), split=split)

    rules = [
        vocab("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        direct("input_layernorm.weight", "input_layernorm.weight", hidden),
        *attention_conversions(config),
        direct("pre_mlp_layernorm.weight", "post_attention_layernorm.weight", hidden),
        Conversion(
            layer + "mlp.linear_fc1.weight",
            tuple(Part(f"{source}mlp.{name}_proj.weight", (inner, hidden)) for name in ("gate", "up")),
            split=0,
        ),
        direct("mlp.linear_fc2.weight", "mlp.down_proj.weight", hidden, inner, split=1),
        Conversion("decoder.final_layernorm.weight", (Part("model.norm.weight", (hidden,)),)),
    ]
    if not layout.tied_embeddings:
        rules.append(vocab("output_layer.weight", "lm_head.weight"))
    return rules


def attention_conversions(config: Mapping[str, Any]) -> list[Conversion]:
    """Return the rules of one layer's attention: q, k and v interleaved by query group, output, norms of q and k."""
    layout = dense_layout({**config, "num_experts": None, "num_local_experts": None})
    hidden, width = layout.hidden_size, layout.head_dim
    rows = {"q": layout.num_heads * width, "k": layout.num_kv_heads * width, "v": layout.num_kv_heads * width}
    layer, source = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."
    qkv_bias, _, _ = projection_biases(config)

    def qkv(kind: str, *trailing: int) -> Conversion:
        parts = tuple(Part(f"{source}{name}_proj.{kind}", (count, *trailing)) for name, count in rows.items())
        return Conversion(f"{layer}linear_qkv.{kind}", parts, split=0, blocks=layout.num_kv_heads)

    rules = [qkv("weight", hidden)]
    if qkv_bias:
        rules.append(qkv("bias"))
    output = Part(source + "o_proj.weight", (hidden, rows["q"]))
    rules.append(Conversion(layer + "linear_proj.weight", (output,), split=1))
    if has_qk_norm(config):
        for name in ("q", "k"):
            norm = Part(f"{source}{name}_norm.weight", (width,))
            rules.append(Conversion(f"{layer}{name}_layernorm.weight", (norm,)))
    return rules
