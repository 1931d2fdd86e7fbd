"""The output head on a GPU in 16-bit precision: what `milepost.training.logprobs` computes, in few passes over logits.

A chunk's logits are written once by their matrix product, in 16 bits, and read by one kernel forwards; backwards they
are made again and one kernel turns them into their gradient. Nothing of a chunk's size exists in float32, so chunks are
twice as long as elsewhere in less memory. With z = factor x logits, in float32:

    normalizer = logsumexp(z)       log_prob = z_target - normalizer       entropy = -sum_j p_j log p_j
    d/dz_j = ([j = target] - p_j) g_log_prob - p_j (log p_j + entropy) g_entropy,   p_j = exp(z_j - normalizer)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from milepost.training.kernels import KERNELS, add_product, fused


def is_streamed(hidden: Tensor) -> bool:
    """Whether this head serves such hidden states."""
    return hidden.is_cuda and hidden.dtype in (torch.bfloat16, torch.float16) and KERNELS.head


def streamed_log_probs(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, factor: float, rows: int, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target and the entropy, [n] float32 each; hidden [n, H], weight [V, H], targets [n] int64.

    Logits are multiplied by `factor`; `rows` of them exist at once.
    """
    arguments = (hidden, weight, targets, factor, rows, entropy)
    log_probs, entropies = _StreamedHead.apply(*arguments)  # type: ignore[no-untyped-call]
    return log_probs, entropies if entropy else None


def _log_softmax(logits: Tensor, normalizer: Tensor, factor: float) -> Tensor:
    # log p stays finite: exp underflows to 0 long before minus infinity, and 0 * -inf would be nan.
    return (logits.float() * factor - normalizer.unsqueeze(1)).clamp(min=torch.finfo(torch.float32).min)


def read_logits(logits: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-prob, entropy and normalizer, [n] float32 each, of logits [n, V]."""
    wide = logits.float() * factor
    normalizer = wide.logsumexp(1)
    log_softmax = _log_softmax(logits, normalizer, factor)
    picked = wide.gather(1, targets.unsqueeze(1)).squeeze(1)
    return picked - normalizer, -(log_softmax.exp() * log_softmax).sum(1), normalizer


def logits_grad(logits: Tensor, targets: Tensor, normalizer: Tensor, grad_log_probs: Tensor, factor: float) -> Tensor:
    """Return the gradient [n, V] of logits, in their dtype, from that of the log-probs [n]."""
    probs = _log_softmax(logits, normalizer, factor).exp()
    own = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
    return ((own.float() - probs) * (grad_log_probs * factor).unsqueeze(1)).to(logits.dtype)


def logits_grad_with_entropy(
    logits: Tensor,
    targets: Tensor,
    normalizer: Tensor,
    entropies: Tensor,
    grad_log_probs: Tensor,
    grad_entropies: Tensor,
    factor: float,
) -> Tensor:
    """Return the gradient [n, V] of logits, in their dtype, from those of log-probs and entropies [n]."""
    log_softmax = _log_softmax(logits, normalizer, factor)
    probs = log_softmax.exp()
    own = torch.arange(logits.shape[1], device=logits.device) == targets.unsqueeze(1)
    grad = (own.float() - probs) * grad_log_probs.unsqueeze(1)
    grad = grad - probs * (log_softmax + entropies.unsqueeze(1)) * grad_entropies.unsqueeze(1)
    return (grad * factor).to(logits.dtype)


read_logits_fused = fused(read_logits)
logits_grad_fused = fused(logits_grad)
logits_grad_with_entropy_fused = fused(logits_grad_with_entropy)


class _StreamedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, factor: float, rows: int, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        count = hidden.shape[0]
        log_probs, entropies, normalizer = (hidden.new_empty(count, dtype=torch.float32) for _ in range(3))
        for start in range(0, count, rows):
            part = slice(start, start + rows)
            logits = hidden[part] @ weight.t()
            log_probs[part], entropies[part], normalizer[part] = read_logits_fused(logits, targets[part], factor)
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropies)
        ctx.factor, ctx.rows = factor, rows
        ctx.set_materialize_grads(False)
        if not entropy:
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropies = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        grad_log_probs = torch.zeros_like(normalizer) if grads[0] is None else grads[0]
        count = hidden.shape[0]
        several = ctx.rows < count
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Sums over chunks are kept in float32: 16 bits would swallow late chunks.
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight and several else None
        for start in range(0, count, ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = hidden[part] @ weight.t()
            if grads[1] is None:
                grad = logits_grad_fused(logits, targets[part], normalizer[part], grad_log_probs[part], ctx.factor)
            else:
                parts = (x[part] for x in (targets, normalizer, entropies, grad_log_probs, grads[1]))
                grad = logits_grad_with_entropy_fused(logits, *parts, ctx.factor)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None and several:
                add_product(grad_weight, grad.t(), hidden[part])
            elif need_weight:
                grad_weight = grad.t() @ hidden[part]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 4
