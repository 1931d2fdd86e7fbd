"""Kernels that only a GPU gets: what a step spends on passes over memory, done in fewer of them.

Each is plain torch, written out here and compiled on first use, or one call of torch's that writes what two would. A
compiled one that this machine cannot compile, and a call that this torch does not have, is replaced by the plain
operations, with a warning. All are on unless the environment variable MILEPOST_KERNELS names those that are to be
(`none`, `all-head`, `norms+grouped`); `benchmarks/megatron_step.py` turns them off to show what they save.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from milepost.errors import ConfigError, Problem

T = TypeVar("T")


@dataclass(slots=True)
class Kernels:
    """Which of them are used."""

    head: bool = True
    """Log-probs, entropy and their gradient read 16-bit logits once or twice, in place of ten passes in float32."""
    norms: bool = True
    """RMS norms in one pass forwards and one backwards."""
    accumulation: bool = True
    """16-bit matrix products that add into a float32 sum: gradients of weights need no buffer of their own."""
    grouped: bool = True
    """Variable-length attention reads each key and value head once, in place of a copy for each of its query heads."""


def kernel_names(text: str) -> tuple[str, ...]:
    """Read which kernels are meant: `all`, `none`, names with `+` between them, `all-NAME` for all but some.

    Raises ValueError for a name there is none of.
    """
    known = tuple(field.name for field in fields(Kernels))
    base, *dropped = text.split("-")
    given = known if base == "all" else () if base == "none" else tuple(base.split("+"))
    for name in (*given, *dropped):
        if name not in known:
            raise ValueError(f"{text!r}: there is no kernel {name!r}, but {', '.join(known)}; or all, or none")
    return tuple(name for name in given if name not in dropped)


def _chosen(text: str) -> Kernels:
    names = kernel_names(text)
    return Kernels(**{field.name: field.name in names for field in fields(Kernels)})


def _from_environment() -> Kernels:
    try:
        return _chosen(os.environ.get("MILEPOST_KERNELS", "all"))
    except ValueError as error:
        raise ConfigError([Problem("MILEPOST_KERNELS", str(error))]) from error


KERNELS = _from_environment()
"""What this process uses."""


@contextmanager
def only(text: str) -> Iterator[None]:
    """Use these kernels alone for a while, named as `kernel_names` reads them."""
    before = replace(KERNELS)
    wanted = _chosen(text)
    for field in fields(Kernels):
        setattr(KERNELS, field.name, getattr(wanted, field.name))
    try:
        yield
    finally:
        for field in fields(Kernels):
            setattr(KERNELS, field.name, getattr(before, field.name))


def fused(function: Callable[..., T]) -> Callable[..., T]:
    """Compile a function of tensors whose first dimension varies and whose others do not.

    Where it cannot be compiled, the function itself runs, and a warning says why.
    """
    compiled: Callable[..., T] | None = None
    fails = False

    @functools.wraps(function)
    def call(*arguments: Any) -> T:
        nonlocal compiled, fails
        if fails:
            return function(*arguments)
        if compiled is None:
            # Not where this module is imported: the compiler takes seconds to import.
            compiled = torch.compile(function)
            # One kernel for each shape beyond the first dimension, with and without gradients: above the 8 that torch
            # compiles before it gives up.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
        for argument in arguments:
            if isinstance(argument, Tensor) and not isinstance(argument, torch.nn.Parameter):
                # Else a second shape would make every dimension that ever differed a variable of the kernel.
                torch._dynamo.maybe_mark_dynamic(argument, 0)
                for dimension in range(1, argument.dim()):
                    torch._dynamo.mark_static(argument, dimension)
        try:
            return compiled(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(f"{function.__name__} cannot be compiled here and runs slower: {reason}", stacklevel=2)
            fails = True
            return function(*arguments)

    return call


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + epsilon) over the last dimension, in float32 at least; x [n, H], weight [H]."""
    wide = x.to(torch.promote_types(torch.float32, x.dtype))
    scale = (wide.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    return (wide * scale * weight).to(x.dtype)


rms_norm_fused = fused(rms_norm)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left [n, k] @ right [k, m] to total [n, m], in the total's precision where a GPU can, else in the factors'.

    16-bit factors and a float32 total take one kernel on a GPU whose torch has it.
    """
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    elif KERNELS.accumulation and has_accumulating_product(total.device):
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left @ right


@functools.lru_cache
def has_accumulating_product(device: torch.device) -> bool:
    """Whether bfloat16 factors can be multiplied into a float32 sum by one kernel of this device; tries it once."""
    if device.type != "cuda":
        return False
    left, right = (torch.arange(16.0, device=device).bfloat16().repeat(16, 1) for _ in range(2))
    total = torch.ones(16, 16, device=device)
    expected = total + left.float().t() @ right.float()
    try:
        torch.addmm(total, left.t(), right, out_dtype=torch.float32, out=total)
    except (TypeError, RuntimeError) as error:
        warnings.warn(_absent("products that add bfloat16 into float32", error), stacklevel=2)
        return False
    # Small whole numbers: nothing is rounded.
    return bool(torch.equal(total, expected))


@functools.lru_cache
def has_grouped_varlen(device: torch.device) -> bool:
    """Whether `varlen_attn` takes fewer key and value heads than query heads; tries it once, gradients too."""
    from torch.nn.attention.varlen import varlen_attn

    if device.type != "cuda":
        return False
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (
        torch.randn(24, heads, 64, device=device, generator=generator).bfloat16() for heads in (4, 2, 2)
    )
    bounds = torch.tensor([0, 8, 24], dtype=torch.int32, device=device)

    def run(repeats: int) -> list[Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in (query, key, value))
        with torch.enable_grad():
            wide_k, wide_v = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (k, v))
            out = varlen_attn(q, wide_k, wide_v, bounds, bounds, 16, 16, window_size=(-1, 0))
            assert isinstance(out, Tensor), "varlen_attn gives a tuple only with return_aux"
            return [out, *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    try:
        found = run(1)
    except (TypeError, ValueError, RuntimeError) as error:
        warnings.warn(_absent("variable-length attention with grouped heads", error), stacklevel=2)
        return False
    pairs = zip(found, run(2), strict=True)
    return all(a.shape == b.shape and torch.allclose(a.float(), b.float(), atol=0.1, rtol=0.05) for a, b in pairs)


def _absent(what: str, error: Exception) -> str:
    reason = str(error).strip().partition("\n")[0]
    return f"torch {torch.__version__} has no {what}, so that steps are slower: {reason}"
