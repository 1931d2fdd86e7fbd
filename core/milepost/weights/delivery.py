"""A push over a network, as one trainer rank makes it: gather a bucket while the one before it is sent.

What differs between transports is how a bucket's bytes get from here into the engines' intakes: their `Carrier`.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from milepost.errors import EngineGone, TransportError
from milepost.weights.intake import Intakes
from milepost.weights.lines import Line, connect
from milepost.weights.sockets import Place, SharedMemory, place_tensors
from milepost.weights.transport import Address, EngineInfo, Manifest, TensorSpec, WeightSource, digest

Named = tuple[str, Tensor]
BUCKETS_IN_FLIGHT = 2
"""One that is filled and one that is sent."""


class Fleet:
    """The lines to the engines of a push, used all at once.

    A context manager that hangs up. Raises EngineGone, naming the engine, if one cannot be reached.
    """

    def __init__(
        self, infos: Sequence[EngineInfo], store: TCPStore, intakes: Mapping[int, Intakes], timeout: float
    ) -> None:
        self._pool = ThreadPoolExecutor(max(1, len(infos)), "milepost-push")
        self.lines: list[Line] = []
        try:
            for info in infos:
                self.lines.append(connect(info, store, intakes, timeout))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        for line in self.lines:
            line.close()
        self._pool.shutdown()

    def ask(self, act: Callable[[Line], Any]) -> list[Any]:
        """Have every engine do something at once; return what they say. Raises as `gather`."""
        return gather(self.begin(act))

    def begin(self, act: Callable[[Line], Any]) -> list[Future[Any]]:
        """Begin to have every engine do something."""
        return [self._pool.submit(act, line) for line in self.lines]


def gather(futures: Sequence[Future[Any]], broken: Callable[[], object] | None = None) -> list[Any]:
    """Wait for all and return what they return; `broken` is called as soon as one fails, to end the others' waiting.

    Raises the failure that says most: an engine that is gone is why others fail.
    """
    wait(futures, return_when=FIRST_EXCEPTION)
    if broken is not None and any(future.done() and future.exception() for future in futures):
        broken()
    wait(futures)
    failures = [error for future in futures if (error := future.exception()) is not None]
    if failures:
        raise worst(failures)
    return [future.result() for future in futures]


def worst(failures: Sequence[BaseException]) -> BaseException:
    """Return the failure that explains the others: an engine that is gone, one that refuses, anything else."""
    return min(failures, key=lambda error: (not isinstance(error, EngineGone), not isinstance(error, TransportError)))


class Carrier(Protocol):
    """Brings buckets from one trainer rank into engines' intakes, through one channel."""

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return memory [num_bytes] uint8 to carry from."""
        ...

    def connect(self, fleet: Fleet) -> None:
        """Open the channel to these engines, or see that it is open; engines are not asked for anything else yet.

        Raises TransportError, or EngineGone, if it cannot be.
        """
        ...

    def carry(self, fleet: Fleet, bucket: Tensor, places: Sequence[Place]) -> None:
        """Bring bytes [n] uint8 into all intakes, and have the tensors in them loaded. Raises as `connect`."""
        ...


class Delivery:
    """Reads a source to its end and sends it meanwhile; what fails is kept until it was read, as others gather with it.

    Args:
        carrier: how bytes get over.
        start: called before the first bucket is sent, while it is gathered; returns the engines, ready to take
            buckets. May wait, and raise.
        limit: bytes of tensors that wait for each other before they are sent.
    """

    def __init__(self, carrier: Carrier, start: Callable[[], Fleet], limit: int) -> None:
        self.fleet: Fleet | None = None
        """The engines, once they were started."""
        self._carrier = carrier
        self._start = start
        self._limit = limit
        self._failure: BaseException | None = None
        self._full: queue.SimpleQueue[tuple[Tensor, list[Place]] | None] = queue.SimpleQueue()
        self._free: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()

    def run(self, tensors: Iterable[Named]) -> BaseException | None:
        """Send the tensors; return what failed, if anything did. Raises what the source raises."""
        for _ in range(BUCKETS_IN_FLIGHT):
            self._free.put(None)
        with ThreadPoolExecutor(1, "milepost-send") as thread:
            sending = thread.submit(self._send)
            try:
                for bucket in buckets(tensors, self._limit):
                    self._full.put(self._pack(bucket))
            finally:
                self._full.put(None)
                sending.result()
        return self._failure

    def _pack(self, bucket: Sequence[Named]) -> tuple[Tensor, list[Place]]:
        """Copy tensors into memory that is not being sent, waiting until there is some."""
        places, num_bytes = place_tensors(bucket)
        device = bucket[0][1].device
        memory = self._free.get()
        if memory is None or len(memory) < num_bytes or memory.device != device:
            memory = self._carrier.allocate(max(num_bytes, self._limit if device.type == "cuda" else 0), device)
        shared = SharedMemory(memory)
        for place, (_, tensor) in zip(places, bucket, strict=True):
            shared.view(place).copy_(tensor)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # it is sent from another thread's stream
        return memory[:num_bytes], places

    def _send(self) -> None:
        try:
            self.fleet = self._start()
        except BaseException as error:  # noqa: BLE001  raised when the source was read
            self._failure = error
        while (packed := self._full.get()) is not None:
            bucket, places = packed
            if self._failure is None and self.fleet is not None:
                try:
                    self._carrier.carry(self.fleet, bucket, places)
                except BaseException as error:  # noqa: BLE001  raised when the source was read
                    self._failure = error
            whole = bucket.untyped_storage().nbytes()
            self._free.put(torch.as_strided(bucket, (whole,), (1,), 0))


def buckets(tensors: Iterable[Named], limit: int) -> Iterator[list[Named]]:
    """Group tensors in order, each group as many as stay within `limit` bytes, at least one."""
    bucket: list[Named] = []
    size = 0
    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if bucket and size + num_bytes > limit:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += num_bytes
    if bucket:
        yield bucket


def manifest_of(version: int, source: WeightSource, *, verify: bool, digests: bool) -> Manifest:
    """Return what a push will carry. When verifying, the source is read once, on all ranks; `digests` says for whom."""
    specs: tuple[TensorSpec, ...] = tuple(source.specs())
    if verify:
        found = {name: digest(tensor) if digests else None for name, tensor in source.tensors()}
        specs = tuple(replace(spec, digest=found.get(spec.name)) for spec in specs)
    return Manifest(version, specs)


def chosen(address: Address, engines: Collection[int] | None) -> tuple[EngineInfo, ...]:
    """Return the engines of a push. Raises TransportError for one that the transport was not opened with."""
    known = {info.index: info for info in address.engines}
    wanted = sorted(known) if engines is None else sorted(set(engines))
    for index in wanted:
        if index not in known:
            raise TransportError(f"no engine {index}; the transport was opened with {list(known)}")
    return tuple(known[index] for index in wanted)
