"""What can be told of a model of unknown family from its `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from milepost.components import ModelLayout
from milepost.weights.layouts import dense_layout, integer

ALIASES = {
    "n_embd": "hidden_size",
    "d_model": "hidden_size",
    "n_layer": "num_hidden_layers",
    "num_layers": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "num_heads": "num_attention_heads",
    "n_positions": "max_position_embeddings",
    "max_seq_len": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "ffn_dim": "intermediate_size",
    "num_local_experts": "num_experts",
}
"""Other names of what `dense_layout` reads."""


def generic_layout(config: Mapping[str, Any]) -> ModelLayout:
    """Return the numbers of a model; the parameter count is exact for Llama-like families and else an estimate.

    GPT-2's names are understood, a missing feed-forward size is four hidden sizes, and the experts of a mixture count
    as that many feed-forwards. Raises ValueError naming a value that is missing or malformed.
    """
    known = dict(config)
    for alias, name in ALIASES.items():
        if known.get(name) is None and known.get(alias) is not None:
            known[name] = known[alias]
    if known.get("intermediate_size") is None:
        known["intermediate_size"] = 4 * integer(known, "hidden_size")
    num_experts = int(known.pop("num_experts", 0) or 0)
    known.pop("num_local_experts", None)
    layout = dense_layout(known)
    if not num_experts:
        return layout
    expert = integer(known, "moe_intermediate_size", integer(known, "intermediate_size"))
    feed_forward = 3 * layout.hidden_size * (num_experts * expert - integer(known, "intermediate_size"))
    router = num_experts * layout.hidden_size
    return replace(
        layout,
        num_experts=num_experts,
        num_parameters=layout.num_parameters + layout.num_layers * (feed_forward + router),
    )
