"""Log-probs and entropy from hidden states, in chunks, so that the full logits of a batch never exist.

With z = f(h W^T) / temperature, f the model's logit scale and softcap, and p = softmax(z) (in float32, also where h is
bfloat16):

    log_prob = z_target - logsumexp(z)        d log_prob / dz_j = [j = target] - p_j
    entropy  = logsumexp(z) - sum_j p_j z_j   d entropy / dz_j  = -p_j (log p_j + entropy)

The backward pass makes each chunk's logits again and adds the chunk's share to the head's gradient. Where all tokens
fit into one chunk, its log-softmax and softmax are kept instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from milepost.training.kernels import add_product
from milepost.training.streamed import is_streamed, streamed_log_probs

CHUNK_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Logits that exist at once, by device type: 16 MiB on a CPU stays near the cache, 512 MiB keeps a GPU busy."""


@dataclass(frozen=True, slots=True)
class HeadSettings:
    """What stands between hidden states and the distribution."""

    temperature: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    chunk_elements: int | None = None
    """Logits that may exist at once; default by device."""

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ValueError(
                f"temperature is {self.temperature}, expected more than 0: greedy decoding has no log-probs"
            )


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    settings: HeadSettings | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target, and the entropy of the distribution it was drawn from; both differentiable.

    Args:
        hidden: [n, H], the hidden state before each target.
        weight: [V, H], the head.
        targets: [n] int64.
        bias: [V], the head's bias if it has one.
        settings: temperature, logit scale, softcap, chunk size.
        entropy: whether the entropy is wanted.

    Returns:
        log-probs [n] and entropy [n] (in nats) or None; float32, float64 for float64 inputs.

    Raises:
        ValueError: shapes do not fit together.
    """
    if (
        hidden.dim() != 2
        or weight.dim() != 2
        or hidden.shape[1] != weight.shape[1]
        or targets.shape != hidden.shape[:1]
    ):
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} were "
            "given, expected [n, H], [V, H] and [n]"
        )
    settings = settings or HeadSettings()
    if bias is None and settings.softcap is None and is_streamed(hidden):
        # Its logits take half of the memory, so twice as many may exist.
        rows = 2 * chunk_rows(hidden.shape[0], weight.shape[0], hidden.device, settings)
        factor = settings.logit_scale / settings.temperature
        return streamed_log_probs(hidden, weight, targets, factor=factor, rows=rows, entropy=entropy)
    arguments = (hidden, weight, bias, targets, settings, entropy)
    result: tuple[Tensor, Tensor | None] = _ChunkedHead.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def chunk_rows(num_rows: int, vocab_size: int, device: torch.device, settings: HeadSettings) -> int:
    """Rows of logits that are made at once."""
    elements = settings.chunk_elements or CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS["cpu"])
    return max(1, min(num_rows, elements // vocab_size))


def _raw_logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    logits = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
    return logits.to(torch.promote_types(torch.float32, hidden.dtype))


def _scale_in_place(logits: Tensor, settings: HeadSettings) -> Tensor | None:
    """Turn raw logits into z; return tanh, which the gradient needs, where there is a softcap."""
    if settings.softcap is None:
        factor = settings.logit_scale / settings.temperature
        if factor != 1.0:
            logits.mul_(factor)
        return None
    tanh = logits.mul_(settings.logit_scale / settings.softcap).tanh_().clone()
    logits.mul_(settings.softcap / settings.temperature)
    return tanh


def _unscale_in_place(grad: Tensor, tanh: Tensor | None, settings: HeadSettings) -> Tensor:
    """Turn the gradient of z into that of the raw logits."""
    if tanh is not None:
        grad.mul_(1 - tanh.square_())
    factor = settings.logit_scale / settings.temperature
    return grad if factor == 1.0 else grad.mul_(factor)


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: HeadSettings,
        want_entropy: bool,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(torch.float32, hidden.dtype)
        count = hidden.shape[0]
        rows = chunk_rows(count, weight.shape[0], hidden.device, settings)
        log_probs = hidden.new_empty(count, dtype=dtype)
        entropies = hidden.new_empty(count, dtype=dtype) if want_entropy else None
        kept: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
        for part in _parts(count, rows):
            logits = _raw_logits(hidden[part], weight, bias)
            tanh = _scale_in_place(logits, settings)
            log_softmax = logits.log_softmax(-1)
            log_probs[part] = log_softmax.gather(1, targets[part].unsqueeze(1)).squeeze(1)
            probs = None
            if entropies is not None:
                probs = log_softmax.exp()
                entropies[part] = -torch.linalg.vecdot(probs, _bounded_in_place(log_softmax))
            if rows == count:
                kept = (log_softmax, probs, tanh)
        ctx.save_for_backward(hidden, weight, bias, targets, entropies, *kept)
        ctx.settings, ctx.rows = settings, rows
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropies, kept, kept_probs, kept_tanh = ctx.saved_tensors
        grad_log_probs, grad_entropies = grads
        settings: HeadSettings = ctx.settings
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        count = hidden.shape[0]
        several = ctx.rows < count
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Sums over chunks are kept in float32 at least: bfloat16 would swallow late chunks.
        sums = torch.promote_types(torch.float32, weight.dtype) if several else weight.dtype
        grad_weight = torch.zeros_like(weight, dtype=sums) if need_weight and several else None
        grad_bias = torch.zeros_like(bias, dtype=torch.promote_types(torch.float32, bias.dtype)) if need_bias else None
        for part in _parts(count, ctx.rows):
            if kept is None:
                logits = _raw_logits(hidden[part], weight, bias)
                tanh = _scale_in_place(logits, settings)
                log_softmax, probs = logits.log_softmax(-1), None
            else:
                log_softmax, probs, tanh = kept, kept_probs, kept_tanh
            grad = _grad_z(
                log_softmax,
                log_softmax.exp() if probs is None else probs,
                targets[part],
                None if grad_log_probs is None else grad_log_probs[part],
                None if grad_entropies is None or entropies is None else (grad_entropies[part], entropies[part]),
            )
            grad = _unscale_in_place(grad, None if tanh is None else tanh.clone(), settings)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part])
            if grad_weight is not None:
                add_product(grad_weight, grad.t(), hidden[part])
            elif need_weight:
                grad_weight = grad.t() @ hidden[part]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _parts(count: int, rows: int) -> Iterator[slice]:
    return (slice(first, min(first + rows, count)) for first in range(0, count, rows))


def _bounded_in_place(log_softmax: Tensor) -> Tensor:
    """Keep log p finite: exp underflows to 0 long before it reaches minus infinity, and 0 * -inf would be nan."""
    return log_softmax.clamp_(min=torch.finfo(log_softmax.dtype).min)


def _grad_z(
    log_softmax: Tensor,
    probs: Tensor,
    targets: Tensor,
    grad_log_probs: Tensor | None,
    entropy: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Gradient [n, V] of the scaled logits; `entropy` is its gradient and value, each [n]."""
    grad = torch.zeros_like(probs) if grad_log_probs is None else probs * -grad_log_probs.unsqueeze(1)
    if grad_log_probs is not None:
        grad.scatter_add_(1, targets.unsqueeze(1), grad_log_probs.unsqueeze(1))
    if entropy is not None:
        grad_entropy, value = entropy
        surprise = log_softmax.clamp(min=torch.finfo(log_softmax.dtype).min) + value.unsqueeze(1)
        grad -= probs * surprise * grad_entropy.unsqueeze(1)
    return grad
