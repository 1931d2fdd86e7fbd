"""The sides of the `ipc` transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from operator import methodcaller

import torch
from milepost.errors import TransportError
from milepost.weights.local import PREFIX, LocalReceiver, find_target
from milepost.weights.sglang import PREFIX as HTTP
from milepost.weights.sglang import HttpReceiver
from milepost.weights.sockets import SCHEME, SocketReceiver, parse_endpoint
from milepost.weights.transport import (
    Address,
    EngineInfo,
    Manifest,
    PushReport,
    RankInfo,
    Receiver,
    WeightSource,
    World,
    digest,
)
from torch import Tensor


class IpcTransport:
    """Implements `milepost.components.Transport` for engines on the trainer's own devices.

    Engines of the trainer's process are at `local:NAME`, those of another process of the node at `unix://NODE/PATH`,
    SGLang servers of the node at `http://HOST:PORT`.
    """

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes

    def open(self, world: World, engines: Sequence[EngineInfo]) -> Address:
        """Check that the engines can be reached, and choose for each the rank that hands over.

        Raises TransportError for an engine that shares no device with a rank, or that is in another place than `ipc`
        reaches, and for two engines with one index.
        """
        if len({engine.index for engine in engines}) != len(engines):
            raise TransportError(f"engines share an index: {[engine.index for engine in engines]}")
        senders = {str(engine.index): _choose_rank(world, engine) for engine in engines}
        return Address("ipc", tuple(engines), world, details={"bucket_bytes": self._bucket_bytes, "senders": senders})

    def sender(self, address: Address, rank: int) -> IpcSender:
        """Return the trainer-rank side."""
        return IpcSender(address, rank)

    def receiver(self, address: Address, engine: int) -> LocalReceiver | None:
        """Return the engine side: None for an engine of another process, which has its own behind its endpoint.

        Raises TransportError if the engine should be in this process and is not.
        """
        endpoint = _engine(address, engine).endpoint
        return LocalReceiver(find_target(endpoint)) if endpoint.startswith(PREFIX) else None


class IpcSender:
    """Implements `milepost.weights.transport.Sender`: one rank hands over, the others take part in gathering."""

    def __init__(self, address: Address, rank: int) -> None:
        self._address = address
        self._rank = rank

    def push(self, version: int, source: WeightSource, engines: Collection[int] | None = None) -> PushReport:
        """Prepare, hand over and commit on each engine; see `milepost.weights.transport.Sender`.

        The report is of the engines that this rank hands over to; `num_bytes` counts the weights once for each. When
        verifying, the source is read twice: for the digests in the manifest, then for the tensors.
        """
        started = time.perf_counter()
        infos = self._address.engines
        if engines is not None:
            infos = tuple(_engine(self._address, index) for index in sorted(set(engines)))
        senders = self._address.details["senders"]
        infos = tuple(info for info in infos if senders[str(info.index)] == self._rank)
        specs = tuple(source.specs())
        if self._address.verify:
            digests = {name: digest(tensor) if infos else None for name, tensor in source.tensors()}
            specs = tuple(replace(spec, digest=digests.get(spec.name)) for spec in specs)
        manifest = Manifest(version, specs)
        with ExitStack() as closing:
            hands = _Hands(infos, closing)
            hands.do(methodcaller("prepare", manifest))
            for bucket in self._buckets(source):
                hands.do(methodcaller("receive", bucket))
            hands.raise_failure()
            hands.do(methodcaller("commit", version))
            hands.raise_failure()
        num_bytes = manifest.num_bytes * len(infos)
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


class _Hands:
    """The receivers of one rank. One that fails is left out, and the others go on.

    The rank has to read its source to the end whatever becomes of its engines: other ranks gather with it.
    """

    def __init__(self, infos: Sequence[EngineInfo], closing: ExitStack) -> None:
        self._receivers: list[Receiver] = []
        self._failure: TransportError | None = None
        for info in infos:
            try:
                self._receivers.append(_connect(info, closing))
            except TransportError as error:
                self._failure = self._failure or error

    def do(self, act: Callable[[Receiver], object]) -> None:
        """Do something with each receiver that has not failed."""
        for receiver in list(self._receivers):
            try:
                act(receiver)
            except TransportError as error:
                self._receivers.remove(receiver)
                self._failure = self._failure or error

    def raise_failure(self) -> None:
        """Raise the first failure, if there was one."""
        if self._failure is not None:
            raise self._failure


def _choose_rank(world: World, engine: EngineInfo) -> int:
    """Return the rank that hands weights to the engine: one on its device, another for each where there are more."""
    candidates: list[RankInfo] = list(world.ranks)
    if engine.endpoint.startswith((SCHEME, HTTP)):
        node = parse_endpoint(engine.endpoint)[0] if engine.endpoint.startswith(SCHEME) else engine.node
        candidates = [rank for rank in world.ranks if rank.node == node and rank.device in engine.devices]
        if not candidates:
            raise TransportError(
                f"engine {engine.index} on {node} ({', '.join(engine.devices)}) shares no device with a trainer rank; "
                "transport ipc needs that: use another transport, or place them together (cluster.colocate: true)"
            )
    elif not engine.endpoint.startswith(PREFIX):
        raise TransportError(
            f"transport ipc reaches engines of its own process ({PREFIX}NAME) or node ({SCHEME}NODE/PATH) and SGLang "
            f"servers of its node ({HTTP}HOST:PORT), engine {engine.index} is at {engine.endpoint!r}"
        )
    elif len(candidates) > 1:
        candidates = candidates[:1]
    return candidates[engine.index % len(candidates)].rank


def _connect(info: EngineInfo, closing: ExitStack) -> Receiver:
    """Return the way to one engine, to be closed with `closing`."""
    if info.endpoint.startswith(PREFIX):
        return LocalReceiver(find_target(info.endpoint))
    device = torch.device("cpu" if info.devices == ("cpu",) else "cuda")
    if info.endpoint.startswith(HTTP):
        return HttpReceiver(info.endpoint, device, tensor_parallel=info.tensor_parallel)
    _, path = parse_endpoint(info.endpoint)
    receiver = SocketReceiver(path, device)
    closing.callback(receiver.close)
    return receiver


def _engine(address: Address, index: int) -> EngineInfo:
    for info in address.engines:
        if info.index == index:
            return info
    raise TransportError(f"no engine {index}; the transport was opened with {[info.index for info in address.engines]}")
