"""Attention over packed rows, registered with transformers as `milepost_packed`.

A model loaded with `attn_implementation="milepost_packed"` is called as

    body(input_ids=tokens, position_ids=layout.positions, use_cache=False, packing=layout)

transformers hands keyword arguments through to every layer's attention, also when a layer is recomputed in the backward
pass, so the layout needs no global state. No mask is built: transformers makes none for an attention implementation
that is not in its mask registry.

On a CPU, and wherever the kernel below does not serve, short samples are regrouped into right-padded buckets of
similar length and attended causally, and long ones one by one. On a GPU in 16-bit precision
`torch.nn.attention.varlen` reads the packed row as it is. Samples of one length are a batch without padding everywhere.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from milepost.training.kernels import KERNELS, has_grouped_varlen
from milepost.training.packing import Layout

ATTENTION = "milepost_packed"
"""Name under which transformers knows this attention."""


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    packing: Layout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each sample of a packed row.

    Args:
        module: the attention layer.
        query: [1, Hq, T, D].
        key: [1, Hk, T, D], Hq a multiple of Hk.
        value: [1, Hk, T, Dv].
        attention_mask: must be None; the layout says it all.
        scaling: factor of the scores; default D ** -0.5.
        dropout: must be 0; a policy's log-probs would not be reproducible.
        sliding_window: tokens each token sees, itself included; None or 0 for all before it.
        softcap: scores become softcap * tanh(scores / softcap).
        packing: the row's layout.
        kwargs: what else transformers hands on; attention sinks and biases are refused.

    Returns:
        [1, T, Hq, Dv], and None in place of attention weights.

    Raises:
        ValueError: the model asks for something this attention does not do, or did not hand the layout on.
    """
    name = type(module).__name__
    if packing is None:
        raise ValueError(
            f"{name} was called without a layout; call the model with packing=Layout(...). If that was done, "
            "this model does not hand keyword arguments to its attention and cannot be trained on packed rows"
        )
    _refuse_unknown(name, attention_mask, dropout, kwargs)
    if query.shape[0] != 1 or query.shape[2] != packing.num_tokens or key.shape[2] != packing.num_tokens:
        raise ValueError(
            f"{name}: query {tuple(query.shape)} and key {tuple(key.shape)} were given, expected one packed row of "
            f"{packing.num_tokens} tokens and no cache"
        )
    window = sliding_window or None
    if not getattr(module, "is_causal", True):
        raise ValueError(f"{name} attends to later tokens; only causal models can be trained as a policy")
    if packing.equal_length is not None:
        return _equal_attention(query, key, value, scaling, window, softcap, packing), None
    if softcap is None and _has_varlen_kernel(query, value):
        return _varlen_attention(query, key, value, scaling, window, packing), None
    return _bucket_attention(query, key, value, scaling, window, softcap, packing), None


def _refuse_unknown(name: str, attention_mask: Tensor | None, dropout: float, kwargs: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ValueError(f"{name} gave an attention mask {tuple(attention_mask.shape)}; a packed row has none")
    if dropout:
        raise ValueError(f"{name} asks for dropout {dropout}, expected 0; put the model into evaluation mode")
    for key in ("s_aux", "sinks", "position_bias", "head_mask", "alibi", "indices"):
        if kwargs.get(key) is not None:
            raise ValueError(f"{name} asks for {key!r}, which attention over packed rows does not have")
    if kwargs.get("is_causal") is False:
        raise ValueError(f"{name} attends to later tokens; only causal models can be trained as a policy")


def _equal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    packing: Layout,
) -> Tensor:
    """All samples are equally long: the row is a batch without padding, and regrouping it only changes strides."""
    count = len(packing.lengths)

    def regroup(x: Tensor) -> Tensor:
        return x.view(x.shape[1], count, -1, x.shape[3]).transpose(0, 1)

    out = _causal(regroup(query), regroup(key), regroup(value), scaling, window, softcap)
    return out.transpose(1, 2).reshape(1, packing.num_tokens, query.shape[1], value.shape[3])


def _bucket_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
    packing: Layout,
) -> Tensor:
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]
    if packing.is_regrouped:
        rows = [_Gather.apply(x, packing) for x in rows]  # type: ignore[no-untyped-call]
    sizes = [bucket.num_tokens for bucket in packing.buckets]
    outputs = []
    for bucket, *parts in zip(packing.buckets, *(torch.split(x, sizes) for x in rows), strict=True):
        q, k, v = (x.unflatten(0, (len(bucket.samples), bucket.length)).transpose(1, 2) for x in parts)
        outputs.append(_causal(q, k, v, scaling, window, softcap).transpose(1, 2).flatten(0, 1))
    padded = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return (padded.index_select(0, packing.restore) if packing.is_regrouped else padded).unsqueeze(0)


class _Gather(torch.autograd.Function):
    """Rows of x [T, H, D] in the order of the buckets, padding included: [P, H, D].

    Padding gets no gradient, because nothing real attends to it and its own output is dropped; so the backward pass is
    a gather too, where autograd's own would add rows up one by one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, packing: Layout) -> Tensor:
        ctx.packing = packing
        return x.index_select(0, packing.gather)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.index_select(0, ctx.packing.restore), None


def _causal(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention over q [B, Hq, L, D], k [B, Hk, L, D], v [B, Hk, L, Dv]: [B, Hq, L, Dv]."""
    length = q.shape[2]
    band = None
    if window is not None and window < length:
        distance = torch.arange(length, device=q.device).unsqueeze(1) - torch.arange(length, device=q.device)
        band = (distance >= 0) & (distance < window)
    if softcap is not None:
        if band is None:
            band = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        return _softcapped(q, k, v, scaling, band, softcap)
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=grouped
    )


def _softcapped(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, band: Tensor, softcap: float) -> Tensor:
    """Attention written out, for what no kernel does: softcap * tanh(scores / softcap) before the softmax."""
    batch, heads, length, width = q.shape
    q = q.reshape(batch, k.shape[1], -1, length, width)
    scores = q @ k.unsqueeze(2).transpose(-1, -2) * (width**-0.5 if scaling is None else scaling)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~band, float("-inf"))
    weights = scores.softmax(-1, dtype=torch.promote_types(torch.float32, q.dtype)).to(v.dtype)
    return (weights @ v.unsqueeze(2)).reshape(batch, heads, length, v.shape[3])


def _has_varlen_kernel(query: Tensor, value: Tensor) -> bool:
    return query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and query.shape[3] == value.shape[3] <= 256


def _varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, packing: Layout
) -> Tensor:
    """FlashAttention on the packed row."""
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    cumulative, longest = packing.cumulative, max(packing.lengths)
    return _varlen(q, k, v, cumulative, cumulative, longest, longest, scaling, window).unsqueeze(0)


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cumulative_q: Tensor,
    cumulative_k: Tensor,
    longest_q: int,
    longest_k: int,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """FlashAttention over q [Tq, Hq, D], k and v [Tk, Hk, D]; the last query of a sample sees the last key."""
    from torch.nn.attention.varlen import varlen_attn

    extra: dict[str, Any] = {}
    if q.shape[1] != k.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            extra["enable_gqa"] = True
        elif not (KERNELS.grouped and has_grouped_varlen(q.device)):
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    before = -1 if window is None else window - 1
    out = varlen_attn(
        q, k, v, cumulative_q, cumulative_k, longest_q, longest_k, scale=scaling, window_size=(before, 0), **extra
    )
    assert isinstance(out, Tensor), "varlen_attn gives a tuple only with return_aux"
    return out


def ragged_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_lengths: Sequence[int],
    key_lengths: Sequence[int],
    *,
    scaling: float | None = None,
) -> Tensor:
    """Causal attention of the ends of samples: a sample's last query sees all its keys, the one before all but one.

    That is what a rank computes under context parallelism, where it has some of a sample's queries and what they see.

    Args:
        query: [Tq, Hq, D], the samples' queries one after the other.
        key: [Tk, Hk, D], Hq a multiple of Hk.
        value: [Tk, Hk, Dv].
        query_lengths: queries of each sample.
        key_lengths: keys of each sample, at least as many.
        scaling: factor of the scores; default D ** -0.5.

    Returns:
        [Tq, Hq, Dv].
    """
    if _has_varlen_kernel(query.unsqueeze(0), value.unsqueeze(0)):
        before_q, before_k = (
            torch.tensor((0, *lengths)).cumsum(0).to(query.device, torch.int32)
            for lengths in (query_lengths, key_lengths)
        )
        longest_q, longest_k = max(query_lengths), max(key_lengths)
        return _varlen(query, key, value, before_q, before_k, longest_q, longest_k, scaling, None)
    outputs = []
    sizes = (list(query_lengths), list(key_lengths), list(key_lengths))
    parts = (torch.split(x, size) for x, size in zip((query, key, value), sizes, strict=True))
    for q, k, v in zip(*parts, strict=True):
        count, seen = len(q), len(k)
        visible = torch.ones(count, seen, dtype=torch.bool, device=q.device).tril(seen - count)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def register() -> None:
    """Make `milepost_packed` known to transformers; done when this module is imported."""
    AttentionInterface.register(ATTENTION, packed_attention)


register()
