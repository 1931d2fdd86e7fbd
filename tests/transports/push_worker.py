"""Processes of the tests of transports between processes: an engine that records, and a trainer rank that pushes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import milepost
import torch
import torch.distributed as dist
from milepost.errors import EngineGone, MilepostError
from milepost.testing.engines import RecordingEngine, Source, make_weights, same_bits
from milepost.weights.sockets import TargetServer
from milepost.weights.transport import Address, EngineInfo, RankInfo, World
from torch import Tensor


class Staged(Source):
    """A source whose first half is the first stage's."""

    def stage_tensors(self) -> Iterator[tuple[str, Tensor]]:
        pairs = list(self.tensors())
        half = len(pairs) // 2
        yield from pairs[:half] if dist.get_rank() == 0 else pairs[half:]


def messages(pipe: Connection) -> Iterator[dict[str, Any]]:
    while True:
        yield pipe.recv()


class FlakyEngine(RecordingEngine):
    """Ends its process, or stops it, at the first tensors when it is told to."""

    signal: int | None = None

    def load(self, tensors: Any) -> None:
        if self.signal is not None:
            os.kill(os.getpid(), self.signal)
        super().load(tensors)


def run_engine(pipe: Connection) -> None:
    torch.set_num_threads(1)
    engine = FlakyEngine(list(make_weights(0)))
    turn = threading.Lock()

    def submit(function: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        with turn:
            try:
                future.set_result(function())
            except Exception as error:  # noqa: BLE001  raised in the server's thread
                future.set_exception(error)
        return future

    server = TargetServer(engine, submit, host="127.0.0.1")
    pipe.send({"endpoint": server.endpoint})
    for message in messages(pipe):
        if message["op"] == "fail":
            engine.signal = int(message["signal"])
        wrong = same_bits(engine.served, make_weights(engine.version)) if not engine.fenced else []
        pipe.send({"fenced": engine.fenced, "version": engine.version, "wrong": wrong})


class Dying(Staged):
    """Kills its process where another source would fail."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        try:
            yield from super().tensors()
        except OSError:
            os.kill(os.getpid(), signal.SIGKILL)

    stage_tensors = tensors


def run_rank(pipe: Connection, rank: int, size: int, store: str) -> None:
    torch.set_num_threads(1)
    backing = dist.FileStore(store, size)
    dist.init_process_group("gloo", store=backing, rank=rank, world_size=size, timeout=timedelta(seconds=240))
    sender: Any = None
    pipe.send({"ready": True})
    for message in messages(pipe):
        try:
            if message["op"] == "open":
                world = World(tuple(RankInfo(r, pipeline=r if message["staged"] else 0, data=0) for r in range(size)))
                infos = [EngineInfo(index, endpoint) for index, endpoint in message["engines"]]
                options = {"bucket_mb": 1, "timeout": message["timeout"]}
                transport = milepost.resolve("transport", message["transport"], options)
                found: list[Address | None] = [transport.open(world, infos) if rank == 0 else None]
                dist.broadcast_object_list(found, src=0)
                assert found[0] is not None
                details = {**found[0].details, "bucket_bytes": 60}
                address = Address(
                    found[0].transport, found[0].engines, world, verify=message["verify"], details=details
                )
                sender = transport.sender(address, rank)
                pipe.send({"ok": True})
                continue
            kind = Dying if message.get("dies") == rank else Staged
            after = 5 if kind is Dying else None
            weights = make_weights(message["version"])
            report = sender.push(message["version"], kind(weights, fails_after=after), message["engines"])
            pipe.send({"ok": True, "bytes": report.num_bytes, "engines": list(report.engines)})
        except MilepostError as error:
            gone = error.endpoint if isinstance(error, EngineGone) else None
            pipe.send({"ok": False, "error": str(error), "gone": gone})
