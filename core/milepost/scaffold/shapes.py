"""The tensor shapes of a model family in terms of its `config.json`, found by looking at models of telling sizes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from milepost.errors import PluginError

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "HIDDEN": ("hidden_size", "n_embd", "d_model"),
    "HEADS": ("num_attention_heads", "n_head", "num_heads"),
    "LAYERS": ("num_hidden_layers", "n_layer", "num_layers"),
    "INNER": ("intermediate_size", "n_inner", "ffn_dim"),
    "VOCAB": ("vocab_size",),
    "POSITIONS": ("max_position_embeddings", "n_positions", "max_seq_len"),
}
_TELLING: Mapping[str, int] = {"HIDDEN": 88, "HEADS": 4, "LAYERS": 2, "INNER": 100, "VOCAB": 130, "POSITIONS": 70}
"""Sizes of which no two sums or multiples that occur in models are equal."""
_EXPERTS: Mapping[str, tuple[str, int]] = {
    "experts": ("num_experts", 3),
    "local_experts": ("num_local_experts", 3),
    "expert_inner": ("moe_intermediate_size", 26),
}
_KV_HEADS, _HEAD_DIM = 2, 14


def layout_values(config: Mapping[str, Any]) -> dict[str, str]:
    """Return what the template of a layout is filled with.

    Raises PluginError if torch and transformers are missing or do not know the model, or a shape is not understood.
    """
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise PluginError(
            f"making a recipe looks at the model itself, which needs {error.name}: pip install 'milepost[torch]'"
        ) from error

    keys = {
        role: next((name for name in names if config.get(name) is not None), "") for role, names in _ALIASES.items()
    }
    missing = [
        " or ".join(_ALIASES[role]) for role in ("HIDDEN", "HEADS", "LAYERS", "VOCAB", "POSITIONS") if not keys[role]
    ]
    if missing:
        raise PluginError(f"config.json has no {', no '.join(missing)}; a recipe for such a model is written by hand")
    telling, sizes, experts = _telling(config, keys)
    fields = {key: value for key, value in telling.items() if key not in ("model_type", "dtype", "torch_dtype")}
    try:
        made = AutoConfig.for_model(config["model_type"], **fields)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(made)
            real = AutoModelForCausalLM.from_config(AutoConfig.for_model(config["model_type"], **_plain(config)))
    except Exception as error:
        raise PluginError(
            f"transformers cannot make a {config['model_type']} model of this config.json: {error}"
        ) from error
    once, layers = _shapes(model, sizes)
    return {
        **{role: name or _ALIASES[role][0] for role, name in keys.items()},
        "ONCE": "\n".join(once),
        "PER_LAYER": "\n".join(layers),
        "TIED_DEFAULT": str(bool(type(made)().tie_word_embeddings)),
        "EXPERTS": "".join(f'        "{name}": integer(config, "{key}"),\n' for name, key in experts.items()),
        "NUM_PARAMETERS": f"{sum(parameter.numel() for parameter in real.parameters()):_}",
    }


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("model_type", "dtype", "torch_dtype")}


def _telling(
    config: Mapping[str, Any], keys: Mapping[str, str]
) -> tuple[dict[str, Any], dict[int, str], dict[str, str]]:
    """Return a config of telling sizes, what each extent then means, and the names of experts' sizes."""
    telling = dict(config)
    for role, name in keys.items():
        if name:
            telling[name] = _TELLING[role]
    telling.update(
        {
            key: value
            for key, value in {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}.items()
            if key in config
        }
    )
    if isinstance(config.get("layer_types"), list):
        telling["layer_types"] = config["layer_types"][:2]
    grouped = config.get("num_key_value_heads") not in (None, config[keys["HEADS"]])
    if config.get("num_key_value_heads") is not None:
        telling["num_key_value_heads"] = _KV_HEADS if grouped else _TELLING["HEADS"]
    head_dim = _TELLING["HIDDEN"] // _TELLING["HEADS"]
    if config.get("head_dim") is not None:
        telling["head_dim"] = head_dim = _HEAD_DIM
    hidden, inner = _TELLING["HIDDEN"], _TELLING["INNER"]
    query, key = _TELLING["HEADS"] * head_dim, (_KV_HEADS if grouped else _TELLING["HEADS"]) * head_dim
    sizes = {
        1: "1",
        head_dim: "head_dim",
        query + 2 * key: "query+2*key",
        2 * inner: "2*inner",
        4 * hidden: "4*hidden",
        key: "key",
        query: "query",
        inner if keys["INNER"] else 4 * hidden: "inner",
        _TELLING["POSITIONS"]: "positions",
        _TELLING["POSITIONS"] + 2: "positions+2",
        _TELLING["VOCAB"]: "vocab",
        3 * hidden: "3*hidden",
        hidden: "hidden",
    }
    experts = {}
    for name, (field, size) in _EXPERTS.items():
        if config.get(field):
            telling[field] = size
            sizes |= {size: name} | ({2 * size: f"2*{name}"} if name == "expert_inner" else {})
            experts[name] = field
    if experts and config.get("num_experts_per_tok"):
        telling["num_experts_per_tok"] = 2
    return telling, sizes, experts


def _shapes(model: Any, sizes: Mapping[int, str]) -> tuple[list[str], list[str]]:
    """Return the lines that list the tensors outside the layers and those of one layer."""
    head = model.get_output_embeddings().weight
    own_head = None if head is model.get_input_embeddings().weight else head
    once: list[str] = []
    layers: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter is own_head:
            continue
        unknown = [extent for extent in parameter.shape if extent not in sizes]
        if unknown:
            raise PluginError(
                f"tensor {name} has the shape {tuple(parameter.shape)} in a model of telling sizes, and "
                f"{unknown[0]} is no sum or multiple that is known here; a recipe for this model is written by hand"
            )
        extents = ", ".join(f'"{sizes[extent]}"' for extent in parameter.shape)
        layer = re.search(r"\.(\d+)\.", name)
        short = name if layer is None else name[layer.end() :]
        line = f"    ({extents},),  # {short}"
        if layer is None:
            once.append(line)
        else:
            layers.setdefault(layer[1], []).append(line)
    if len({tuple(sorted(Counter(lines).items())) for lines in layers.values()}) != 1:
        raise PluginError("the layers of this model have different tensors; a recipe for it is written by hand")
    return once, next(iter(layers.values()))
