"""The sides of the `broadcast` transport."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from datetime import timedelta
from operator import methodcaller

import torch
import torch.distributed as dist
from milepost.errors import EngineGone, TransportError
from milepost.weights.delivery import Delivery, Fleet, chosen, gather, manifest_of, worst
from milepost.weights.intake import Intakes
from milepost.weights.lines import host_store, is_reachable, own_address, unreachable
from milepost.weights.local import PREFIX
from milepost.weights.sockets import Place
from milepost.weights.transport import (
    Address,
    EngineInfo,
    Manifest,
    PushReport,
    StagedSource,
    WeightSource,
    World,
)
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from milepost_broadcast.groups import SOURCE, Group, GroupIntake

NAME = "broadcast"


class BroadcastTransport:
    """Implements `milepost.components.Transport` for engines on devices of their own.

    SGLang servers are at `http://HOST:PORT`, local engines of other processes at `tcp://HOST:PORT/TOKEN`, on any node.
    Those of the sender's own process (`local:NAME`) are reached through the loopback, as another process would be.

    SGLang's own calls for this (`update_weights_from_distributed`) are not used: they load what comes, a tensor at a
    time, know no manifest and no digest, and wait for a lost sender half an hour. A receiver of milepost's inside the
    server takes part in a group of milepost's instead, and holds the push to the promises that hold for `ipc`.
    """

    def __init__(self, bucket_bytes: int, timeout: float) -> None:
        self._bucket_bytes = bucket_bytes
        self._timeout = timeout

    def open(self, world: World, engines: Sequence[EngineInfo]) -> Address:
        """Choose the rank that sends for each pipeline stage, and what they speak.

        Raises TransportError for an engine in a place that is not reached, and for two engines with one index.
        """
        if len({engine.index for engine in engines}) != len(engines):
            raise TransportError(f"engines share an index: {[engine.index for engine in engines]}")
        for engine in engines:
            if not is_reachable(engine):
                raise TransportError(unreachable(engine))
        stages = sorted({rank.pipeline for rank in world.ranks})
        sources = [min(rank.rank for rank in world.ranks if rank.pipeline == stage) for stage in stages]
        on_cpus = any(rank.device == "cpu" for rank in world.ranks)
        on_cpus = on_cpus or any("cpu" in e.devices or e.endpoint.startswith(PREFIX) for e in engines)
        details = {
            "bucket_bytes": self._bucket_bytes,
            "timeout": self._timeout,
            "sources": sources,
            "backend": "gloo" if on_cpus else "nccl",
            "id": uuid.uuid4().hex,
        }
        return Address(NAME, tuple(engines), world, details=details)

    def sender(self, address: Address, rank: int) -> BroadcastSender:
        """Return the trainer-rank side."""
        return BroadcastSender(address, rank)

    def receiver(self, address: Address, engine: int) -> None:
        """Return None: the engine's process has its own (`intake`)."""

    def intake(self, device: torch.device) -> GroupIntake:
        """Return the engine side; see `milepost.weights.intake`."""
        return GroupIntake(device)


class GroupCarrier:
    """Implements `milepost.weights.delivery.Carrier`: the source rank's member of a group with the engines."""

    def __init__(self, channel: str, backend: str, store: TCPStore, timeout: float) -> None:
        self._channel = channel
        self._backend = backend
        self._store = store
        self._timeout = timeout
        self._group: Group | None = None
        self._members: tuple[EngineInfo, ...] = ()

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        """Return memory to send from."""
        return torch.empty(num_bytes, dtype=torch.uint8, device="cpu" if self._backend == "gloo" else device)

    def connect(self, fleet: Fleet) -> None:
        """Form a group with these engines, unless there is one that they all are still in."""
        infos = tuple(line.info for line in fleet.lines)
        if self._group is not None and infos == self._members and all(fleet.ask(methodcaller("probe", self._channel))):
            return
        self.close()
        sizes = [info.tensor_parallel * info.pipeline_parallel for info in infos]
        message = {
            "host": self._store.host,
            "port": self._store.port,
            "name": uuid.uuid4().hex,
            "size": 1 + sum(sizes),
            "backend": self._backend,
            "timeout": self._timeout,
        }
        firsts = {info.index: 1 + sum(sizes[:position]) for position, info in enumerate(infos)}
        joining = fleet.begin(
            lambda line: line.open(
                self._channel,
                NAME,
                [{**message, "rank": firsts[line.info.index] + rank} for rank in range(line.info.tensor_parallel)],
            )
        )
        failures: list[BaseException] = []
        device = torch.device("cpu") if self._backend == "gloo" else torch.device("cuda", torch.cuda.current_device())
        try:
            self._group = Group(
                self._store,
                str(message["name"]),
                rank=SOURCE,
                size=1 + sum(sizes),
                backend=self._backend,
                timeout=self._timeout,
                device=device,
            )
        except TransportError as error:
            failures.append(error)
        try:
            gather(joining)
        except Exception as error:  # noqa: BLE001  the failure that explains the others is raised below
            failures.append(error)
        if failures:
            self.close()
            raise worst(failures)
        self._members = infos

    def carry(self, fleet: Fleet, bucket: Tensor, places: Sequence[Place]) -> None:
        """Broadcast a bucket while the engines receive it."""
        if self._group is None:
            raise TransportError("a bucket was to be sent before there was a group")
        filling = fleet.begin(methodcaller("fill", self._channel, list(places), len(bucket)))
        failures: list[BaseException] = []
        try:
            self._group.broadcast(bucket)
        except TransportError as error:
            failures.append(error)
        try:
            gather(filling, broken=self.close)
        except Exception as error:  # noqa: BLE001  the failure that explains the others is raised below
            failures.append(error)
        if failures:
            self.close()
            raise worst(failures)

    def close(self) -> None:
        """Leave the group; the next push forms another."""
        group, self._group = self._group, None
        if group is not None:
            group.close()


class BroadcastSender:
    """Implements `milepost.weights.transport.Sender`.

    The sending ranks take turns, stage after stage: what bounds a push is the engines' side, which takes in everything.
    """

    def __init__(self, address: Address, rank: int) -> None:
        details = address.details
        self._address = address
        self._rank = rank
        self._limit = int(details["bucket_bytes"])
        self._timeout = float(details["timeout"])
        self._sources: list[int] = list(details["sources"])
        self._intakes = {info.index: Intakes(torch.device("cpu")) for info in address.engines}
        self._store: TCPStore | None = None
        self._carrier: GroupCarrier | None = None
        self._num_pushes = 0

    def push(self, version: int, source: WeightSource, engines: Collection[int] | None = None) -> PushReport:
        """Prepare, broadcast and commit on each engine; see `milepost.weights.transport.Sender`.

        The first stage's report is of all engines, other ranks' of none. Raises EngineGone if an engine died or hangs.
        When verifying, the source is read twice: for the digests in the manifest, then for the tensors.
        """
        started = time.perf_counter()
        infos = chosen(self._address, engines)
        self._num_pushes += 1
        staged = len(self._sources) > 1 and isinstance(source, StagedSource)
        leads = self._rank == self._sources[0]
        manifest = manifest_of(version, source, verify=self._address.verify, digests=leads)
        tensors = source.stage_tensors() if staged and isinstance(source, StagedSource) else source.tensors()
        if not infos or not (leads or (staged and self._rank in self._sources)):
            for _ in tensors:
                pass
            return PushReport(version, 0, time.perf_counter() - started, ())
        turns = _Turns(self._address, self._num_pushes, manifest, self._limit, self._timeout) if staged else None
        stage = self._sources.index(self._rank)
        store, carrier = self._meeting(infos, stage)

        def start() -> Fleet:
            if turns is not None and stage > 0:
                turns.wait(stage - 1)
            fleet = Fleet(infos, store, self._intakes, self._timeout)
            closing.enter_context(fleet)
            carrier.connect(fleet)
            if stage == 0:
                fleet.ask(methodcaller("prepare", manifest))
            return fleet

        failure: BaseException | None = None
        try:
            with ExitStack() as closing:
                delivery = Delivery(carrier, start, self._limit)
                failure = delivery.run(tensors)
                if failure is None and turns is None and delivery.fleet is not None:
                    delivery.fleet.ask(methodcaller("commit", version))
        except BaseException as error:
            failure = error
            raise
        finally:
            if turns is not None:
                turns.done(stage, failure)
        if failure is not None:
            raise failure
        if turns is not None and leads:
            turns.wait(len(self._sources) - 1)
            with Fleet(infos, store, self._intakes, self._timeout) as fleet:
                fleet.ask(methodcaller("commit", version))
        served = tuple(info.index for info in infos) if leads else ()
        return PushReport(version, manifest.num_bytes * len(served), time.perf_counter() - started, served)

    def _meeting(self, infos: Sequence[EngineInfo], stage: int) -> tuple[TCPStore, GroupCarrier]:
        """Return this rank's store, where it can be reached from the engines, and its member of a group."""
        if self._store is None or self._carrier is None:
            self._store = host_store(own_address(infos), self._timeout)
            backend = str(self._address.details["backend"])
            self._carrier = GroupCarrier(f"{NAME}-{stage}", backend, self._store, self._timeout)
        return self._store, self._carrier


class _Turns:
    """The order of the stages in one push, kept in the store through which the trainer's ranks found each other."""

    def __init__(self, address: Address, push: int, manifest: Manifest, limit: int, timeout: float) -> None:
        if not dist.is_initialized():
            raise TransportError("pipeline stages push together, but this rank is in no process group; initialise one")
        self._store: Store = dist.distributed_c10d._get_default_store()
        self._prefix = f"milepost/{address.details['id']}/{push}"
        # Every bucket of the stages before has its own time.
        self._limit = timedelta(seconds=timeout * (manifest.num_bytes // limit + len(manifest.tensors) + 3))

    def done(self, stage: int, failure: BaseException | None) -> None:
        """Say that a stage is through, or what it failed with."""
        gone = failure.endpoint if isinstance(failure, EngineGone) else None
        message = None if failure is None else f"{failure}" if str(failure) else repr(failure)
        self._store.set(f"{self._prefix}/{stage}", json.dumps({"error": message, "gone": gone}))

    def wait(self, stage: int) -> None:
        """Wait until a stage is through. Raises what it, or one before it, failed with."""
        key = f"{self._prefix}/{stage}"
        try:
            self._store.wait([key], self._limit)
        except RuntimeError as error:
            raise TransportError(f"stage {stage} did not send its weights in time: {error}") from error
        found = json.loads(self._store.get(key))
        self._store.delete_key(key)
        if found["gone"] is not None:
            raise EngineGone(found["gone"], found["error"])
        if found["error"] is not None:
            raise TransportError(f"stage {stage} did not send its weights: {found['error']}")
