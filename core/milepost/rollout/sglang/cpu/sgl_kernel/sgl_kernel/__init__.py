"""SGLang's kernels on a CPU without AMX: what its torch path calls, in plain torch.

Everything else is there by name, so that modules which merely import it load, and raises NotImplementedError when it
is called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from torch import Tensor

__version__ = "0.0.0+milepost"


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write where the new tokens of each request lie in the cache into the request's row.

    `req_to_token` [pool, pool_len] int32 is written at rows `req_pool_indices` [R], columns `start_offset` [R] to
    `end_offset` [R], from the consecutive entries of `out_cache_loc` [sum of the spans].
    """
    position = 0
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    for row, start, end in spans:
        count = end - start
        req_to_token[row, start:end] = out_cache_loc[position : position + count].to(req_to_token.dtype)
        position += count


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} has no CPU stand-in; choose engine.options that SGLang serves in plain torch "
            "(attention_backend: torch_native, sampling_backend: pytorch)"
        )

    return kernel
