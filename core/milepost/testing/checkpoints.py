"""Tiny checkpoints: a model of any family with a few thousand random weights, made from its `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

HEAD_DIM = 8
SIZES: Mapping[str, int] = {
    **dict.fromkeys(("vocab_size",), 96),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "max_window_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("head_dim", "query_pre_attn_scalar", "sliding_window"), HEAD_DIM),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok",), 2),
    **dict.fromkeys(("moe_intermediate_size",), 24),
}
"""What a size becomes where a config has it; everything else stays as it is."""


def tiny_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `config.json` of the same family and kind with two small layers.

    Grouped key-value heads stay grouped (2 of 4), kinds of layers stay mixed, and tied embeddings stay tied.
    """
    tiny = {key: SIZES[key] if key in SIZES and isinstance(value, int) else value for key, value in config.items()}
    heads = config.get("num_attention_heads", config.get("n_head"))
    if isinstance(config.get("num_key_value_heads"), int):
        tiny["num_key_value_heads"] = 4 if config["num_key_value_heads"] == heads else 2
    if isinstance(config.get("layer_types"), list):
        kinds = list(dict.fromkeys(config["layer_types"]))
        tiny["layer_types"] = (kinds * 2)[:2]
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    tiny.update({key: value for key, value in special.items() if key in config})
    return tiny


def config_of(architecture: str) -> dict[str, Any]:
    """Return the `config.json` that transformers has by default for an architecture such as `Qwen3ForCausalLM`.

    Raises ValueError if transformers does not know it.
    """
    import transformers

    model = getattr(transformers, architecture, None)
    if model is None or getattr(model, "config_class", None) is None:
        raise ValueError(
            f"transformers has no {architecture}, so its config.json is not known; give one: check_model(..., "
            "config=...), or `milepost plugins check NAME --config config.json`"
        )
    config: dict[str, Any] = json.loads(model.config_class().to_json_string(use_diff=False))
    return {**config, "architectures": [architecture]}


def read_config(path: Path) -> dict[str, Any]:
    """Return a `config.json`, given by its own path or its folder's. Raises ValueError if it is not a JSON object."""
    file = path / "config.json" if path.is_dir() else path
    config = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a JSON object")
    return config


def make_checkpoint(config: Mapping[str, Any], folder: Path, seed: int = 0) -> Any:
    """Write a checkpoint of random float32 weights; return the transformers model, in evaluation mode.

    Every weight counts: norms and biases are random, too, so that what reads one wrongly computes something else.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    fields = {key: value for key, value in config.items() if key not in ("model_type", "dtype", "torch_dtype")}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoConfig.for_model(config["model_type"], **fields)
        model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, attn_implementation="eager").eval()
        stir(model.parameters(), seed)
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()
    return model


def stir(parameters: Any, seed: int) -> None:
    """Add noise to every parameter in place; with another seed other noise."""
    generator = torch.Generator().manual_seed(1000 + seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.15 * torch.randn(parameter.shape, generator=generator))


def prompts_for(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Return token ids of these lengths; 3 and above, so that none is a special token."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]
