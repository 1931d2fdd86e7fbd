"""Device memory given back and taken again: the storages of tensors, copied to pinned host memory and emptied.

The tensors themselves stay what they are, views of their storages; only what lies below them goes and comes. So nothing
that holds a tensor (optimizer, gradient buckets) needs to know.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor, UntypedStorage


class HostCopy:
    """The storages of some tensors, each once.

    On a CPU nothing moves. The host memory is kept between turns, because pinning it costs more than copying.

    Args:
        tensors: what is to go and come together.
        without: tensors whose storages stay, though some of `tensors` are views of them.
        constant: the values never change, so that they are copied to the host once.
        reuse: an earlier copy of the same tensors and perhaps fewer, whose host memory is taken over.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        *,
        without: Sequence[Tensor] = (),
        constant: bool = False,
        reuse: HostCopy | None = None,
    ) -> None:
        staying = {_key(tensor) for tensor in without}
        self._storages: dict[int, UntypedStorage] = {}
        for tensor in tensors:
            if tensor.is_cuda and _key(tensor) not in staying:
                storage = tensor.untyped_storage()
                self._storages.setdefault(_key(tensor), storage)
        self._sizes = {key: storage.nbytes() for key, storage in self._storages.items()}
        earlier = {} if reuse is None else reuse._host
        self._host: dict[int, Tensor] = {
            key: earlier[key] for key, size in self._sizes.items() if key in earlier and earlier[key].numel() == size
        }
        self._constant = constant
        self._stream: torch.cuda.Stream | None = None
        self._arriving: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        """Begin and end of what is on its way to the device."""
        self.gigabytes_per_second = 0.0
        """Of the last move; 0 where nothing moved."""

    @property
    def num_bytes(self) -> int:
        """Bytes that go and come."""
        return sum(self._sizes.values())

    def offload(self) -> None:
        """Copy to the host and give the device memory back."""
        self.wait()
        started = time.perf_counter()
        for key, storage in self._storages.items():
            if key in self._host and self._constant:
                continue
            if key not in self._host:
                self._host[key] = torch.empty(self._sizes[key], dtype=torch.uint8, pin_memory=True)
            self._host[key].copy_(_bytes(storage), non_blocking=True)
        if not self._storages:
            return
        torch.cuda.synchronize()
        self.gigabytes_per_second = self.num_bytes / (time.perf_counter() - started) / 1e9
        for storage in self._storages.values():
            storage.resize_(0)
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Take device memory again and begin to copy back, beside what the device computes; `wait` before its use."""
        if not self._storages:
            return
        for key, storage in self._storages.items():
            storage.resize_(self._sizes[key])
        self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # The memory may have been another tensor's, which queued kernels still read.
        self._stream.wait_stream(torch.cuda.current_stream())
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._stream):
            begin.record()
            for key, storage in self._storages.items():
                _bytes(storage).copy_(self._host[key], non_blocking=True)
            end.record()
        self._arriving = begin, end

    def wait(self) -> None:
        """Wait until what `onload` began is there."""
        if self._arriving is None:
            return
        begin, end = self._arriving
        self._arriving = None
        end.synchronize()
        self.gigabytes_per_second = self.num_bytes / begin.elapsed_time(end) / 1e6


def _key(tensor: Tensor) -> int:
    """Identify a storage, which may be empty at the moment."""
    key: int = tensor.untyped_storage()._cdata
    return key


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
