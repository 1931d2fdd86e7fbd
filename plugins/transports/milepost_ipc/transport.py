"""The sides of the `ipc` transport."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from milepost.errors import TransportError
from milepost.weights.local import PREFIX, LocalReceiver, find_target
from milepost.weights.transport import (
    Address,
    EngineInfo,
    Manifest,
    PushReport,
    WeightSource,
    World,
    digest,
)
from torch import Tensor


class IpcTransport:
    """Implements `milepost.components.Transport` for engines on the trainer's own devices."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    def open(self, world: World, engines: Sequence[EngineInfo]) -> Address:
        """Check that the engines can be reached and return where they are.

        Raises TransportError for an engine outside this process, which this release of `ipc` cannot reach, and for two
        engines with one index.
        """
        for engine in engines:
            if not engine.endpoint.startswith(PREFIX):
                raise TransportError(
                    f"transport ipc reaches engines of its own process ({PREFIX}NAME), engine {engine.index} is at "
                    f"{engine.endpoint!r}; use engine.backend: local"
                )
        if len({engine.index for engine in engines}) != len(engines):
            raise TransportError(f"engines share an index: {[engine.index for engine in engines]}")
        return Address("ipc", tuple(engines), world, details={"bucket_bytes": self._bucket_bytes})

    def sender(self, address: Address, rank: int) -> IpcSender:
        """Return the trainer-rank side."""
        return IpcSender(address, rank)

    def receiver(self, address: Address, engine: int) -> LocalReceiver:
        """Return the engine side. Raises TransportError if the engine is not in this process."""
        return LocalReceiver(find_target(_engine(address, engine).endpoint))


class IpcSender:
    """Implements `milepost.weights.transport.Sender`: rank 0 hands over, the others take part in gathering."""

    def __init__(self, address: Address, rank: int) -> None:
        self._address = address
        self._rank = rank

    def push(self, version: int, source: WeightSource, engines: Collection[int] | None = None) -> PushReport:
        """Prepare, hand over and commit on each engine; see `milepost.weights.transport.Sender`.

        `num_bytes` counts what this rank handed over, once for every engine. When verifying, the source is read twice:
        for the digests in the manifest, then for the tensors.
        """
        started = time.perf_counter()
        infos = self._address.engines
        if engines is not None:
            infos = tuple(_engine(self._address, index) for index in sorted(set(engines)))
        specs = tuple(source.specs())
        if self._address.verify:
            digests = {name: digest(tensor) if self._rank == 0 else None for name, tensor in source.tensors()}
            specs = tuple(replace(spec, digest=digests.get(spec.name)) for spec in specs)
        manifest = Manifest(version, specs)
        receivers = [LocalReceiver(find_target(info.endpoint)) for info in infos] if self._rank == 0 else []
        for receiver in receivers:
            receiver.prepare(manifest)
        for bucket in self._buckets(source):
            for receiver in receivers:
                receiver.receive(bucket)
        for receiver in receivers:
            receiver.commit(version)
        num_bytes = manifest.num_bytes * len(receivers)
        return PushReport(version, num_bytes, time.perf_counter() - started, tuple(info.index for info in infos))

    def _buckets(self, source: WeightSource) -> Iterator[list[tuple[str, Tensor]]]:
        """Group the source's tensors, so that few hand-overs carry many small ones and gathered ones do not pile up."""
        limit = int(self._address.details["bucket_bytes"])
        bucket: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in source.tensors():
            num_bytes = tensor.numel() * tensor.element_size()
            if bucket and size + num_bytes > limit:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, tensor))
            size += num_bytes
        if bucket:
            yield bucket


def _engine(address: Address, index: int) -> EngineInfo:
    for info in address.engines:
        if info.index == index:
            return info
    raise TransportError(f"no engine {index}; the transport was opened with {[info.index for info in address.engines]}")
