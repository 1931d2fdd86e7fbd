"""The sides of the `ipc` transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist
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

from milepost_ipc.joint import JointReceiver


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
        senders = {str(engine.index): _choose_ranks(world, engine) for engine in engines}
        return Address("ipc", tuple(engines), world, details={"bucket_bytes": self._bucket_bytes, "senders": senders})

    def sender(self, address: Address, rank: int) -> IpcSender:
        """Return the trainer-rank side. Where an engine has several GPUs, called on all ranks together."""
        groups = {}
        for index, ranks in address.details["senders"].items():
            if len(ranks) > 1:
                groups[int(index)] = dist.new_group(sorted(ranks), backend="gloo")
        return IpcSender(address, rank, groups)

    def receiver(self, address: Address, engine: int) -> LocalReceiver | None:
        """Return the engine side: None for an engine of another process, which has its own behind its endpoint.

        Raises TransportError if the engine should be in this process and is not.
        """
        endpoint = _engine(address, engine).endpoint
        return LocalReceiver(find_target(endpoint)) if endpoint.startswith(PREFIX) else None


class IpcSender:
    """Implements `milepost.weights.transport.Sender`: one rank hands over to an engine, the others help gathering.

    To an engine of several GPUs the ranks on them hand over together.
    """

    def __init__(self, address: Address, rank: int, groups: Mapping[int, Any] | None = None) -> None:
        """`groups` has the process group of each engine that several ranks hand over to."""
        self._address = address
        self._rank = rank
        self._groups = groups or {}

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
        infos = tuple(info for info in infos if self._rank in senders[str(info.index)])
        specs = tuple(source.specs())
        if self._address.verify:
            digests = {name: digest(tensor) if infos else None for name, tensor in source.tensors()}
            specs = tuple(replace(spec, digest=digests.get(spec.name)) for spec in specs)
        manifest = Manifest(version, specs)
        with ExitStack() as closing:
            hands = _Hands([partial(self._connect, info, closing) for info in infos])
            hands.do(methodcaller("prepare", manifest))
            for bucket in self._buckets(source):
                hands.do(methodcaller("receive", bucket))
            hands.raise_failure()
            hands.do(methodcaller("commit", version))
            hands.raise_failure()
        reported = tuple(info.index for info in infos if senders[str(info.index)][0] == self._rank)
        return PushReport(version, manifest.num_bytes * len(reported), time.perf_counter() - started, reported)

    def _connect(self, info: EngineInfo, closing: ExitStack) -> Receiver:
        """Return the way to one engine, to be closed with `closing`."""
        if info.endpoint.startswith(PREFIX):
            return LocalReceiver(find_target(info.endpoint))
        device = torch.device("cpu" if info.devices[0].startswith("cpu") else "cuda")
        if info.index in self._groups:
            ranks = self._address.details["senders"][str(info.index)]
            order = [sorted(ranks).index(rank) for rank in ranks]
            return JointReceiver(info.endpoint, device, self._groups[info.index], order)
        if info.endpoint.startswith(HTTP):
            return HttpReceiver(info.endpoint, device, tensor_parallel=info.tensor_parallel)
        _, path = parse_endpoint(info.endpoint)
        receiver = SocketReceiver(path, device)
        closing.callback(receiver.close)
        return receiver

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

    def __init__(self, connections: Sequence[Callable[[], Receiver]]) -> None:
        self._receivers: list[Receiver] = []
        self._failure: TransportError | None = None
        for connect in connections:
            try:
                self._receivers.append(connect())
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


def _choose_ranks(world: World, engine: EngineInfo) -> list[int]:
    """Return the ranks that hand weights to an engine.

    One on its device, another for each engine where there are more; for an engine of several GPUs one on each of them,
    in their order.
    """
    candidates: list[RankInfo] = list(world.ranks)
    if engine.endpoint.startswith((SCHEME, HTTP)):
        node = parse_endpoint(engine.endpoint)[0] if engine.endpoint.startswith(SCHEME) else engine.node
        candidates = [rank for rank in world.ranks if rank.node == node and rank.device in engine.devices]
        there = {rank.device: rank.rank for rank in reversed(candidates)}
        remedy = "use another transport, or place them together (cluster.colocate: true)"
        if not candidates:
            raise TransportError(
                f"engine {engine.index} on {node} ({', '.join(engine.devices)}) shares no device with a trainer rank; "
                f"transport ipc needs that: {remedy}"
            )
        if len(engine.devices) > 1:
            if missing := [device for device in engine.devices if device not in there]:
                raise TransportError(
                    f"engine {engine.index} on {node} has no trainer rank on {', '.join(missing)}; transport ipc needs "
                    f"one on each of its devices: {remedy}"
                )
            return [there[device] for device in engine.devices]
    elif not engine.endpoint.startswith(PREFIX):
        raise TransportError(
            f"transport ipc reaches engines of its own process ({PREFIX}NAME) or node ({SCHEME}NODE/PATH) and SGLang "
            f"servers of its node ({HTTP}HOST:PORT), engine {engine.index} is at {engine.endpoint!r}"
        )
    elif len(candidates) > 1:
        candidates = candidates[:1]
    return [candidates[engine.index % len(candidates)].rank]


def _engine(address: Address, index: int) -> EngineInfo:
    for info in address.engines:
        if info.index == index:
            return info
    raise TransportError(f"no engine {index}; the transport was opened with {[info.index for info in address.engines]}")
