"""The halves of the `llama` recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from milepost.recipe import HFModel
from milepost.rollout.local.decoder import LeanDecoder
from milepost.training.dense import add_batch_body
from milepost.weights.hf import load_causal_lm

from milepost_llama.megatron import LlamaMegatron


class LlamaHF:
    """Implements `milepost.recipe.HFHalf`."""

    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> HFModel:
        """Load a Llama checkpoint for training, with a batch body of its own on a CPU."""
        model = load_causal_lm(path, dtype, device)
        return add_batch_body(model, json.loads((path / "config.json").read_text(encoding="utf-8")))

    def decoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> LeanDecoder:
        """Make an empty lean decoder. Raises ValueError for sliding windows or a rotation it does not know."""
        return LeanDecoder(config, dtype, device)


class LlamaRecipe:
    """Implements `milepost.recipe.Recipe`."""

    def __init__(self) -> None:
        self.hf = LlamaHF()
        self.megatron = LlamaMegatron()
