"""The sides of the `p2p` transport."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from operator import methodcaller
from urllib.parse import urlsplit

import torch
from milepost.errors import EngineGone, TransportError
from milepost.weights.delivery import Delivery, Fleet, chosen, gather, manifest_of
from milepost.weights.intake import Intakes
from milepost.weights.lines import LOOPBACK, Line, host_store, is_reachable, own_address, route, unreachable
from milepost.weights.sockets import ALIGNMENT, Place
from milepost.weights.transport import Address, EngineInfo, Manifest, PushReport, WeightSource, World
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from milepost_p2p.mooncake import Endpoint, MemoryIntake, choose_protocol, endpoint

NAME = "p2p"


class P2PTransport:
    """Implements `milepost.components.Transport` for engines on devices of their own.

    Every rank holds the whole tensors when it has gathered them, so each engine is written to by one rank, and the
    engines are spread over the ranks. Each rank of a tensor-parallel engine is written whole tensors, of which its
    model takes its part: shards are not sent yet.
    """

    def __init__(self, protocol: str, bucket_bytes: int, timeout: float) -> None:
        self._protocol = protocol
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout

    def open(self, world: World, engines: Sequence[EngineInfo]) -> Address:
        """Choose the rank that writes to each engine.

        Raises TransportError for an engine in a place that is not reached, and for two engines with one index.
        """
        if len({engine.index for engine in engines}) != len(engines):
            raise TransportError(f"engines share an index: {[engine.index for engine in engines]}")
        for engine in engines:
            if not is_reachable(engine):
                raise TransportError(unreachable(engine))
        ranks = [rank.rank for rank in world.ranks]
        details = {
            "protocol": choose_protocol(self._protocol),
            "bucket_bytes": self._bucket_bytes,
            "timeout": self._timeout,
            "writers": {str(e.index): ranks[position % len(ranks)] for position, e in enumerate(engines)},
        }
        return Address(NAME, tuple(engines), world, details=details)

    def sender(self, address: Address, rank: int) -> P2PSender:
        """Return the trainer-rank side."""
        return P2PSender(address, rank)

    def receiver(self, address: Address, engine: int) -> None:
        """Return None: the engine's process has its own (`intake`)."""

    def intake(self, device: torch.device) -> MemoryIntake:
        """Return the engine side; see `milepost.weights.intake`."""
        return MemoryIntake(device)


class MemoryCarrier:
    """Implements `milepost.weights.delivery.Carrier`: writes into the registered memory of each rank of each engine."""

    def __init__(self, channel: str, host: str, protocol: str, limit: int) -> None:
        self._channel = channel
        self._host = host
        self._protocol = protocol
        self._limit = limit
        self._capacity = 0
        self._targets: dict[int, list[tuple[str, int]]] = {}
        """Segment and address of each rank, by engine."""
        self._members: tuple[EngineInfo, ...] = ()
        self._memory: list[Tensor] = []

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return registered memory to write from."""
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        endpoint(self._host, self._protocol).register(memory)
        self._memory.append(memory)
        return memory

    def release(self) -> None:
        """Take back the memory that was written from."""
        self._memory.clear()

    def connect(self, fleet: Fleet) -> None:
        """Have the engines register memory, unless they have."""
        infos = tuple(line.info for line in fleet.lines)
        if infos == self._members and all(fleet.ask(methodcaller("probe", self._channel))):
            return
        self._register(fleet, self._limit)

    def _register(self, fleet: Fleet, capacity: int) -> None:
        self._members = ()

        def register(line: Line) -> list[tuple[str, int]]:
            # Where the engine's route leads back to: what it listens on is for the sender to reach.
            host = route(urlsplit(line.info.endpoint).hostname or LOOPBACK)
            message = {"host": host, "protocol": self._protocol, "bytes": capacity}
            answers = line.open(self._channel, NAME, [message] * line.info.tensor_parallel)
            return [(str(answer["segment"]), int(answer["pointer"])) for answer in answers]

        found = fleet.ask(register)
        self._targets = {line.info.index: targets for line, targets in zip(fleet.lines, found, strict=True)}
        self._capacity = capacity
        self._members = tuple(line.info for line in fleet.lines)

    def carry(self, fleet: Fleet, bucket: Tensor, places: Sequence[Place]) -> None:
        """Write a bucket to every rank of every engine, and have the engines load it."""
        if len(bucket) > self._capacity:
            self._register(fleet, len(bucket))  # one tensor that is larger than a bucket
        mine: Endpoint = endpoint(self._host, self._protocol)

        def write(line: Line) -> None:
            for segment, pointer in self._targets[line.info.index]:
                try:
                    mine.write(segment, pointer, bucket)
                except TransportError as error:
                    raise EngineGone(line.info.endpoint, f"engine {line.info.index}: {error}") from error
            line.fill(self._channel, places, len(bucket))

        gather(fleet.begin(write))


class P2PSender:
    """Implements `milepost.weights.transport.Sender`."""

    def __init__(self, address: Address, rank: int) -> None:
        self._address = address
        self._rank = rank
        self._limit = int(address.details["bucket_bytes"])
        self._timeout = float(address.details["timeout"])
        self._intakes = {info.index: Intakes(torch.device("cpu")) for info in address.engines}
        self._store: TCPStore | None = None
        self._carrier: MemoryCarrier | None = None

    def push(self, version: int, source: WeightSource, engines: Collection[int] | None = None) -> PushReport:
        """Prepare, write and commit on each engine; see `milepost.weights.transport.Sender`.

        The report is of the engines that this rank writes to. Raises EngineGone if an engine died or hangs.
        When verifying, the source is read twice: for the digests in the manifest, then for the tensors.
        """
        started = time.perf_counter()
        writers = self._address.details["writers"]
        infos = tuple(info for info in chosen(self._address, engines) if writers[str(info.index)] == self._rank)
        manifest = manifest_of(version, source, verify=self._address.verify, digests=bool(infos))
        if not infos:
            for _ in source.tensors():
                pass
            return PushReport(version, 0, time.perf_counter() - started, ())
        store, carrier = self._meeting(infos, manifest)

        def start() -> Fleet:
            fleet = closing.enter_context(Fleet(infos, store, self._intakes, self._timeout))
            carrier.connect(fleet)
            fleet.ask(methodcaller("prepare", manifest))
            return fleet

        with ExitStack() as closing:
            closing.callback(carrier.release)
            delivery = Delivery(carrier, start, self._limit)
            failure = delivery.run(source.tensors())
            if failure is not None:
                raise failure
            if delivery.fleet is not None:
                delivery.fleet.ask(methodcaller("commit", version))
        served = tuple(info.index for info in infos)
        return PushReport(version, manifest.num_bytes * len(served), time.perf_counter() - started, served)

    def _meeting(self, infos: Sequence[EngineInfo], manifest: Manifest) -> tuple[TCPStore, MemoryCarrier]:
        """Return this rank's store, where it can be reached from the engines, and its way of writing to them."""
        if self._store is None or self._carrier is None:
            host = own_address(infos)
            self._store = host_store(host, self._timeout)
            protocol = str(self._address.details["protocol"])
            # Registered memory is locked: no more of it than a small model fills.
            whole = sum(spec.num_bytes + ALIGNMENT for spec in manifest.tensors)
            self._carrier = MemoryCarrier(f"{NAME}-{self._rank}", host, protocol, min(self._limit, whole))
        return self._store, self._carrier
