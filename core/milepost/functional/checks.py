"""Shape checks that every function here makes before it computes."""

from __future__ import annotations

from torch import Tensor


def check_flat(**tensors: Tensor | None) -> int:
    """Return the common length of flat tensors; None is skipped.

    Raises ValueError naming every shape unless all are of rank 1 and equally long.
    """
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    shapes = {tuple(tensor.shape) for tensor in given.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        listing = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in given.items())
        raise ValueError(f"expected flat tensors of one length [N], got {listing}")
    return int(next(iter(shapes))[0])


def check_ragged(lengths: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless `lengths` [S] int64 are the lengths of samples that have `num_tokens` tokens together."""
    if lengths.dim() != 1 or lengths.is_floating_point():
        raise ValueError(f"expected lengths of shape [S] and dtype int64, got {tuple(lengths.shape)} {lengths.dtype}")
    total = int(lengths.sum())
    if total != num_tokens:
        raise ValueError(f"the lengths sum to {total}, but there are {num_tokens} tokens; lengths must cover them all")


def check_ids(**ids: Tensor) -> None:
    """Raise ValueError if an id tensor holds a negative id, which is what a sample has before ids are assigned."""
    for name, tensor in ids.items():
        if tensor.numel() and int(tensor.min()) < 0:
            raise ValueError(f"{name} holds {int(tensor.min())}; ids must be 0 or more, so assign them first")
