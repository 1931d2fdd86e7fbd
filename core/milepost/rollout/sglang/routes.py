"""Where in a model each tensor of a push goes, found by watching the model's own `load_weights`.

A model's loader knows which rows of which fused, sharded parameter a Hugging Face tensor becomes. It is run once over
tensors that lie in a known buffer, and every copy out of that buffer into a parameter is written down. From then on the
copies alone are played, all of a bucket at once; and whoever wants to know what arrived reads the destinations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from milepost.weights.sglang import Slot


@dataclass(frozen=True, slots=True)
class Route:
    """One copy: part of a sent tensor becomes part of a parameter."""

    destination: Tensor
    """View into the parameter."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    """Of the part, in elements."""
    offset: int
    """Of the part, in elements from the front of the sent tensor."""

    def source(self, tensor: Tensor) -> Tensor:
        """Return the part of a sent tensor that goes this way; the tensor is contiguous."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down copies from a buffer into a model's parameters while it is active."""

    def __init__(self, buffer: Tensor, slots: Iterable[Slot], model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.routes: dict[str, list[Route]] = {}
        self.num_opaque = 0
        """Writes into parameters of values that do not come straight out of the buffer."""
        self._slots = sorted(slots, key=lambda slot: slot.start)
        self._buffer = buffer.untyped_storage().data_ptr()
        self._front = buffer.storage_offset() * buffer.element_size()
        self._owned = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.is_mutable and args and isinstance(args[0], Tensor) and self._owns(args[0]):
            source = args[1] if len(args) > 1 else None
            if func is torch.ops.aten.copy_.default and isinstance(source, Tensor) and self._is_sent(source):
                self._record(args[0], source)
            elif func not in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):  # padding
                self.num_opaque += 1
        return result

    def _owns(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._owned

    def _is_sent(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._buffer

    def _record(self, destination: Tensor, source: Tensor) -> None:
        start = source.storage_offset() * source.element_size() - self._front
        slot = next(slot for slot in reversed(self._slots) if slot.start <= start)
        offset = (start - slot.start) // source.element_size()
        route = Route(destination.detach(), tuple(source.shape), tuple(source.stride()), offset)
        self.routes.setdefault(slot.name, []).append(route)


@torch.no_grad()
def play(routes: Mapping[str, Sequence[Route]], tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Copy tensors where their routes lead."""
    destinations, sources = [], []
    for name, tensor in tensors:
        for route in routes[name]:
            destinations.append(route.destination)
            sources.append(route.source(tensor))
    if destinations:
        torch._foreach_copy_(destinations, sources)
