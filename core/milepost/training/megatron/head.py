"""Log-probs and entropy from hidden states, in chunks, with the vocabulary spread over tensor-parallel ranks.

The mathematics is that of `milepost.training.logprobs`. Rank r holds the logits z_j of its own rows of the head; with
s_r = logsumexp of its logits the ranks agree on

    logsumexp(z) = m + log sum_r exp(s_r - m),   m = max_r s_r
    sum_j p_j z_j = sum_r exp(s_r - logsumexp(z)) e_r,   e_r = the expectation of z over the rank's own logits

so that for each chunk a maximum and one sum of three numbers a token pass between ranks, and no logits do.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from milepost.training.kernels import add_product
from milepost.training.logprobs import HeadSettings, chunk_rows, token_log_probs


def vocab_parallel_log_probs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    group: Any,
    vocab_size: int,
    settings: HeadSettings | None = None,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target, and the entropy of the distribution it was drawn from; both differentiable.

    The gradient of `hidden` is this rank's part; its sum over the group is the whole.

    Args:
        hidden: [n, H], the hidden state before each target, the same on every rank of the group.
        weight: [V / ranks, H], this rank's rows of the padded head.
        targets: [n] int64, the same on every rank.
        group: the tensor-parallel ranks.
        vocab_size: rows of the head that are tokens; padding beyond them has no probability.
        settings: temperature, logit scale, chunk size; a softcap is not served.
        entropy: whether the entropy is wanted.

    Returns:
        log-probs [n] and entropy [n] (in nats) or None; float32, float64 for float64 inputs; the same on every rank.

    Raises:
        ValueError: the settings have a softcap.
    """
    settings = settings or HeadSettings()
    if settings.softcap is not None:
        raise ValueError(f"softcap is {settings.softcap}, which the vocabulary-parallel head does not serve")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first = rank * weight.shape[0]
    own = min(max(vocab_size - first, 0), weight.shape[0])
    # Ranks take the same chunks, also those that have padding alone.
    rows = chunk_rows(hidden.shape[0], weight.shape[0], hidden.device, settings)
    if own < weight.shape[0]:
        weight = weight[:own]
    if size == 1:
        return token_log_probs(hidden, weight, targets, settings=settings, entropy=entropy)
    result: tuple[Tensor, Tensor | None] = _VocabParallelHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets - first, group, settings, entropy, rows
    )
    return result


def _logits(hidden: Tensor, weight: Tensor, settings: HeadSettings) -> Tensor:
    logits = (hidden @ weight.t()).to(torch.promote_types(torch.float32, hidden.dtype))
    factor = settings.logit_scale / settings.temperature
    return logits if factor == 1.0 else logits.mul_(factor)


class _VocabParallelHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: Any,
        settings: HeadSettings,
        entropy: bool,
        rows: int,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = torch.promote_types(torch.float32, hidden.dtype)
        count = hidden.shape[0]
        normalizer = hidden.new_empty(count, dtype=dtype)
        log_probs = torch.empty_like(normalizer)
        entropies = torch.empty_like(normalizer) if entropy else None
        for start in range(0, count, rows):
            part = slice(start, min(start + rows, count))
            logits = _logits(hidden[part], weight, settings)
            local = logits.logsumexp(1)
            largest = local.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            share = (local - largest).exp()
            sums = [share, _own_logit(logits, targets[part])]
            if entropies is not None:
                # exp(z - largest) is a rank's share times its own distribution.
                sums.append(((logits - largest.unsqueeze(1)).exp_() * logits).sum(1))
            totals = torch.stack(sums)
            dist.all_reduce(totals, group=group)
            normalizer[part] = largest + totals[0].log()
            log_probs[part] = totals[1] - normalizer[part]
            if entropies is not None:
                entropies[part] = normalizer[part] - totals[2] / totals[0]
        ctx.save_for_backward(hidden, weight, targets, normalizer, entropies)
        ctx.settings, ctx.rows = settings, rows
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, normalizer, entropies = ctx.saved_tensors
        grad_log_probs, grad_entropies = grads
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        count = hidden.shape[0]
        several = ctx.rows < count
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        # Sums over chunks are kept in float32 at least: bfloat16 would swallow late chunks.
        sums = torch.promote_types(torch.float32, weight.dtype) if several else weight.dtype
        grad_weight = torch.zeros_like(weight, dtype=sums) if need_weight else None
        for start in range(0, count, ctx.rows):
            part = slice(start, min(start + ctx.rows, count))
            log_softmax = _logits(hidden[part], weight, ctx.settings).sub_(normalizer[part].unsqueeze(1))
            probs = log_softmax.exp()
            grad = torch.zeros_like(probs)
            if grad_log_probs is not None:
                grad -= probs * grad_log_probs[part].unsqueeze(1)
                _add_to_own(grad, targets[part], grad_log_probs[part])
            if grad_entropies is not None and entropies is not None:
                surprise = log_softmax.clamp_(min=torch.finfo(log_softmax.dtype).min) + entropies[part].unsqueeze(1)
                grad -= probs * surprise * grad_entropies[part].unsqueeze(1)
            grad = grad.mul_(ctx.settings.logit_scale / ctx.settings.temperature).to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = grad @ weight
            if grad_weight is not None:
                add_product(grad_weight, grad.t(), hidden[part])
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), *(None,) * 5


def _own(targets: Tensor, own: int) -> tuple[Tensor, Tensor]:
    """Return whether each target is among this rank's rows, and its row or 0."""
    mine = (targets >= 0) & (targets < own)
    return mine, torch.where(mine, targets, 0)


def _own_logit(logits: Tensor, targets: Tensor) -> Tensor:
    """Return each target's logit [n], 0 where another rank has it."""
    mine, rows = _own(targets, logits.shape[1])
    if not logits.shape[1]:
        return logits.new_zeros(len(logits))
    return torch.where(mine, logits.gather(1, rows.unsqueeze(1)).squeeze(1), 0.0)


def _add_to_own(grad: Tensor, targets: Tensor, values: Tensor) -> None:
    """Add a value [n] at each target that is among this rank's rows."""
    mine, rows = _own(targets, grad.shape[1])
    if grad.shape[1]:
        grad.scatter_add_(1, rows.unsqueeze(1), torch.where(mine, values, 0.0).unsqueeze(1))
