"""The local engine's Qwen3-MoE model: transformers' forward, fed with the tensors that checkpoints have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from milepost.rollout.local.hf_decoder import HFDecoder
from torch import Tensor

from milepost_qwen3_moe.layout import num_experts

EXPERT = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class Qwen3MoeDecoder(HFDecoder):
    """Implements `milepost.recipe.Decoder`; a layer's experts are held until all are there, then stacked."""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(config, dtype, device)
        self._num_experts = num_experts(config)
        self._experts: dict[str, dict[tuple[int, str], Tensor]] = {}
        """By the name of a stacked tensor: what has come of it, by expert and projection."""

    @torch.inference_mode()
    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy Hugging Face tensors in; see `milepost.recipe.Decoder`."""
        for name, tensor in tensors:
            found = EXPERT.fullmatch(name)
            if found is None:
                super().load([(name, tensor)])
                continue
            layer, expert, kind = found[1], int(found[2]), found[3]
            if expert >= self._num_experts:
                raise KeyError(f"the model has no tensor {name!r}")
            kinds = ("down",) if kind == "down" else ("gate", "up")
            stacked = f"{layer}.{'_'.join(kinds)}_proj"
            held = self._experts.setdefault(stacked, {})
            # What is handed over may be overwritten after this call.
            held[expert, kind] = tensor.detach().to(self.device, self.dtype, copy=True)
            if len(held) == self._num_experts * len(kinds):
                rows = [torch.cat([held[index, kind] for kind in kinds]) for index in range(self._num_experts)]
                del self._experts[stacked]
                super().load([(stacked, torch.stack(rows))])

    def unload(self) -> None:
        """Drop the weights; see `milepost.recipe.Decoder`."""
        self._experts.clear()
        super().unload()
