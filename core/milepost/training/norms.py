"""RMS norms in fewer passes over memory than transformers' own take, for training in float32 on a CPU.

Without a fused kernel the norm's forward and backward are a dozen elementwise operations, which on small models cost
as much as attention does. Written out as one function they are seven, and keep one tensor less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

PLAIN_RMS_NORMS = frozenset(
    {"LlamaRMSNorm", "MistralRMSNorm", "Olmo2RMSNorm", "Qwen2RMSNorm", "Qwen3MoeRMSNorm", "Qwen3RMSNorm"}
)
"""transformers' norms that compute weight * x / sqrt(mean(x^2) + variance_epsilon) and nothing else."""


def speed_up_norms(model: nn.Module) -> int:
    """Let the model's plain RMS norms use `rms_norm` wherever input and weight are float32 on a CPU.

    Parameters and modules stay what they are. Returns how many norms that is.
    """
    norms = [module for module in model.modules() if type(module).__name__ in PLAIN_RMS_NORMS]
    for norm in norms:
        norm.forward = _faster(norm, norm.forward)
    return len(norms)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension; x [..., H], weight [H], both differentiable."""
    result: Tensor = _RmsNorm.apply(x, weight, epsilon)  # type: ignore[no-untyped-call]
    return result


def _faster(norm: nn.Module, original: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    epsilon = cast("float", norm.variance_epsilon)

    def forward(x: Tensor) -> Tensor:
        weight = cast("Tensor", norm.weight)
        if x.dtype == weight.dtype == torch.float32 and not x.is_cuda:
            return rms_norm(x, weight, epsilon)
        return original(x)

    return forward


class _RmsNorm(torch.autograd.Function):
    """With r = 1 / sqrt(mean(x^2) + epsilon), y = r x and u = weight * grad: dx = r (u - y mean(u y))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        scale = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(epsilon).rsqrt_().unsqueeze(-1)
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        result: Tensor = normed * weight
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        normed, scale, weight = ctx.saved_tensors
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        grad = grad * weight
        mean = torch.linalg.vecdot(grad, normed).div_(normed.shape[-1]).unsqueeze(-1)
        return grad.addcmul_(normed, mean, value=-1).mul_(scale), grad_weight, None
