"""The halves of the `generic` recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from milepost.recipe import HFModel
from milepost.rollout.local.hf_decoder import HFDecoder
from milepost.weights.hf import load_causal_lm


class GenericHF:
    """Implements `milepost.recipe.HFHalf`."""

    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> HFModel:
        """Load a checkpoint for training."""
        return load_causal_lm(path, dtype, device)

    def decoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> HFDecoder:
        """Make an empty decoder. Raises ValueError for a kind of layer without keys and values by position."""
        return HFDecoder(config, dtype, device)


class GenericRecipe:
    """Implements `milepost.recipe.Recipe`."""

    def __init__(self) -> None:
        self.hf = GenericHF()
        self.megatron = None
