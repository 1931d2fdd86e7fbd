"""Rotary position embedding: frequencies from a `config.json`, and the cosine and sine tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from milepost.weights.layouts import attention_shape, rope_parameters


def inverse_frequencies(config: Mapping[str, Any]) -> Tensor:
    """Return the inverse frequencies [head_dim / 2] float32 (arXiv 2104.09864; `llama3` as in Llama 3.1's release).

    Serves the types default, linear and llama3; raises ValueError for another type or a partial rotation.
    """
    parameters = rope_parameters(config)
    _, _, head_dim = attention_shape(config)
    kind = parameters["rope_type"]
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("config.json rotates only part of each head; set `model.recipe: generic` to generate with it")
    exponents: Tensor = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies: Tensor = 1.0 / (float(parameters["rope_theta"]) ** exponents)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(parameters["factor"])
    if kind != "llama3":
        raise ValueError(
            f"config.json has rope_type {kind!r}, expected default, linear or llama3; "
            "set `model.recipe: generic` to generate with it"
        )
    # Long waves are slowed by `factor`, short ones kept, those between interpolated.
    names = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    factor, context, low, high = (float(parameters[name]) for name in names)
    waves = context * frequencies / (2 * math.pi)
    blend = ((waves - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies


def rotation_table(frequencies: Tensor, positions: int) -> Tensor:
    """Return [positions, 2, head_dim] float32: cosines, and sines whose first half is negated.

    With x rolled by half a head, the rotation is x * cos + roll(x) * signed sin.
    """
    angles = torch.arange(positions).float()[:, None] * frequencies
    sines = angles.sin()
    return torch.stack([torch.cat([angles.cos()] * 2, 1), torch.cat([-sines, sines], 1)], 1)
