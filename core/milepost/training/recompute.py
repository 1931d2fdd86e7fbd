"""Activation checkpointing: what a layer computed is made again in the backward pass instead of being kept."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers.modeling_layers import GradientCheckpointingLayer

KEPT = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
    }
)
"""Operations whose results `selective` keeps: matrix products and attention, the costly ones."""


def enable_recompute(body: nn.Module, mode: Literal["none", "selective", "full"]) -> int:
    """Make every layer of the body compute again what its backward pass needs.

    `full` keeps only the layers' inputs; `selective` also the results of matrix products and attention. transformers'
    own switch is not used because it works in training mode alone, which brings dropout with it.

    Returns:
        How many layers that is.

    Raises:
        ValueError: the body has no layers that transformers marks as fit for checkpointing.
    """
    if mode == "none":
        return 0
    layers = [module for module in body.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(
            f"{type(body).__name__} has no layers fit for activation checkpointing; set trainer.recompute to none"
        )
    for layer in layers:
        layer.forward = _recomputed(layer.forward, mode)
    return len(layers)


def _recomputed(forward: Callable[..., Any], mode: Literal["selective", "full"]) -> Callable[..., Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(partial(forward, **kwargs), *args, **options)

    return run


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation.name() in KEPT else CheckpointPolicy.PREFER_RECOMPUTE
