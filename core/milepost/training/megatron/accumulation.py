"""Gradients of weights added into Megatron's float32 buffers by the matrix products that make them.

Megatron's linear layers do so with a kernel of Apex; where that is not installed, this puts torch's own product in its
place. It spares each micro-batch a gradient in 16 bits and one more pass over the buffer.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from milepost.training.kernels import KERNELS, add_product, has_accumulating_product


def accumulates_in_products(device: torch.device) -> bool:
    """Whether Megatron's linear layers can add into float32 buffers; makes them able to where torch is."""
    if not (KERNELS.accumulation and has_accumulating_product(device)):
        return False
    provide()
    return True


def provide() -> None:
    """Give Megatron's linear layers the product, unless they have Apex's."""
    from megatron.core.tensor_parallel import layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=_accumulate)
        layers._grad_accum_fusion_available = True


def _accumulate(inputs: Tensor, grad: Tensor, total: Tensor) -> None:
    """Add grad^T [out, n] @ inputs [n, in] to total [out, in]."""
    add_product(total, grad.t(), inputs)
