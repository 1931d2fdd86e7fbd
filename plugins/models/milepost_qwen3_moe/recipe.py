"""The halves of the `qwen3_moe` recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from milepost.recipe import HFModel
from milepost.weights.hf import load_causal_lm

from milepost_qwen3_moe.decoder import Qwen3MoeDecoder
from milepost_qwen3_moe.megatron import Qwen3MoeMegatron


class Qwen3MoeHF:
    """Implements `milepost.recipe.HFHalf`."""

    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> HFModel:
        """Load a Qwen3-MoE checkpoint for training."""
        return load_causal_lm(path, dtype, device)

    def decoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Qwen3MoeDecoder:
        """Make an empty decoder that runs the model's own forward."""
        return Qwen3MoeDecoder(config, dtype, device)


class Qwen3MoeRecipe:
    """Implements `milepost.recipe.Recipe`."""

    def __init__(self) -> None:
        self.hf = Qwen3MoeHF()
        self.megatron = Qwen3MoeMegatron()
