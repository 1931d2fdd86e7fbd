"""Ways from a trainer rank to an engine, on whichever node it is: over them a push is directed, its bytes go elsewhere.

An engine of the sender's own process is called (`local:NAME`), one of another process is sent JSON over TCP
(`tcp://HOST:PORT/TOKEN`), a SGLang server JSON over HTTP (`http://HOST:PORT`). What a server's weight loader has to say
comes back through the sender's store, since SGLang reports nothing of it.
"""

from __future__ import annotations

import base64
import json
import pickle
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch
from torch._C._distributed_c10d import TCPStore

from milepost.errors import EngineGone, TransportError
from milepost.weights.intake import Intakes, Message
from milepost.weights.local import PREFIX, LocalReceiver, find_target
from milepost.weights.sglang import ACCEPTED, FENCED, LOADER, Slot, manifest_json, request
from milepost.weights.sglang import PREFIX as HTTP
from milepost.weights.sockets import TCP, Place, SharedMemory, SocketReceiver
from milepost.weights.transport import EngineInfo, Manifest

LOOPBACK = "127.0.0.1"


class Line(Protocol):
    """The way to one engine. Every call ends within its time limit.

    All raise TransportError if the engine refuses, EngineGone if it does not answer.
    """

    info: EngineInfo

    def probe(self, channel: str) -> bool:
        """Whether all ranks of the engine have this channel open."""
        ...

    def open(self, channel: str, transport: str, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Open a channel: one message for each rank of the engine, one answer of each."""
        ...

    def prepare(self, manifest: Manifest) -> None:
        """Fence the engine and announce these tensors."""
        ...

    def fill(self, channel: str, places: Sequence[Place], num_bytes: int) -> None:
        """Have the engine take a bucket from the channel and load the tensors that lie in it."""
        ...

    def commit(self, version: int) -> None:
        """Have the engine check that it has everything, and serve the version."""
        ...

    def close(self) -> None:
        """Hang up."""
        ...


class LocalLine:
    """An engine of this process; its channels are real ones, through the loopback."""

    def __init__(self, info: EngineInfo, intakes: Intakes) -> None:
        self.info = info
        self._intakes = intakes
        self._receiver = LocalReceiver(find_target(info.endpoint))

    def probe(self, channel: str) -> bool:
        """Whether the channel is open."""
        return self._intakes.is_open(channel)

    def open(self, channel: str, transport: str, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Open a channel."""
        [message] = messages
        return [self._intakes.open(channel, transport, message)]

    def prepare(self, manifest: Manifest) -> None:
        """Fence the engine and announce these tensors."""
        self._receiver.prepare(manifest)

    def fill(self, channel: str, places: Sequence[Place], num_bytes: int) -> None:
        """Load a bucket."""
        bucket = SharedMemory(self._intakes.take(channel, num_bytes))
        self._receiver.receive([(place[0], bucket.view(place)) for place in places])

    def commit(self, version: int) -> None:
        """Serve the version."""
        self._receiver.commit(version)

    def close(self) -> None:
        """Do nothing: channels are kept for the next push."""


class SocketLine:
    """A local engine in another process, on any node."""

    def __init__(self, info: EngineInfo, timeout: float) -> None:
        self.info = info
        url = urlsplit(info.endpoint)
        address = (url.hostname or "", url.port or 0)
        self._receiver = SocketReceiver(address, torch.device("cpu"), token=url.path[1:], timeout=timeout)

    def probe(self, channel: str) -> bool:
        """Whether the channel is open."""
        return bool(self._receiver.ask({"op": "probe", "channel": channel})["open"])

    def open(self, channel: str, transport: str, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Open a channel."""
        [message] = messages
        asked = {"op": "open", "channel": channel, "transport": transport, "message": dict(message)}
        return [self._receiver.ask(asked)]

    def prepare(self, manifest: Manifest) -> None:
        """Fence the engine and announce these tensors."""
        self._receiver.prepare(manifest)

    def fill(self, channel: str, places: Sequence[Place], num_bytes: int) -> None:
        """Load a bucket."""
        self._receiver.ask({"op": "fill", "channel": channel, "tensors": list(places), "bytes": num_bytes})

    def commit(self, version: int) -> None:
        """Serve the version."""
        self._receiver.commit(version)

    def close(self) -> None:
        """Hang up; an engine that has not committed stays fenced."""
        self._receiver.close()


class HttpLine:
    """A SGLang server; `milepost.rollout.sglang.receiver` acts inside each of its ranks."""

    def __init__(self, info: EngineInfo, store: TCPStore, timeout: float) -> None:
        self.info = info
        self._store = store
        self._timeout = timeout

    def probe(self, channel: str) -> bool:
        """Whether all ranks have the channel open."""
        return all(answer["open"] for answer in self._ask({"act": "probe", "channel": channel}))

    def open(self, channel: str, transport: str, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Open a channel on all ranks."""
        return self._ask({"act": "open", "channel": channel, "transport": transport}, messages=messages)

    def prepare(self, manifest: Manifest) -> None:
        """Fence the server and announce these tensors."""
        self._ask({"act": "prepare", "manifest": manifest_json(manifest)}, version=FENCED)

    def fill(self, channel: str, places: Sequence[Place], num_bytes: int) -> None:
        """Load a bucket."""
        slots = [asdict(Slot(name, tuple(shape), dtype, offset)) for name, shape, dtype, offset in places]
        self._ask({"act": "fill", "channel": channel, "slots": slots, "bytes": num_bytes})

    def commit(self, version: int) -> None:
        """Serve the version, with an empty cache: what it holds was computed with the old weights."""
        self._ask({"act": "commit", "version": version})
        request(self.info.endpoint, "/flush_cache", {}, self._timeout)
        body = {"new_version": str(version), "abort_all_requests": False}
        request(self.info.endpoint, "/update_weight_version", body, self._timeout)

    def close(self) -> None:
        """Do nothing: there is no connection to keep."""

    def _ask(
        self,
        header: Mapping[str, Any],
        *,
        messages: Sequence[Mapping[str, Any]] = (),
        version: str | None = None,
    ) -> list[Message]:
        """Have each rank do an act, and return the answers."""
        ranks = range(self.info.tensor_parallel)
        keys = [f"answer-{uuid.uuid4().hex}" for _ in ranks]
        packets = []
        for rank, key in zip(ranks, keys, strict=True):
            own: dict[str, Any] = {**header, "reply": [self._store.host, self._store.port, key]}
            if messages:
                own["message"] = dict(messages[rank])
            packets.append(_packet(json.dumps(own)))
        body: dict[str, Any] = {"serialized_named_tensors": packets, "load_format": LOADER, "flush_cache": False}
        if version is not None:
            body["weight_version"] = version
        request(self.info.endpoint, "/update_weights_from_tensor", body, self._timeout)
        return [self._answer(key) for key in keys]

    def _answer(self, key: str) -> Message:
        if not self._store.check([key]):
            raise TransportError(
                f"the engine at {self.info.endpoint} gave no answer: it cannot reach the trainer's store at "
                f"{self._store.host}:{self._store.port}, or runs another milepost; its log says which"
            )
        found = json.loads(self._store.get(key))
        self._store.delete_key(key)
        if found["status"] != ACCEPTED:
            raise TransportError(f"the engine at {self.info.endpoint} refused: {found['message']}")
        answer: Message = found["answer"]
        return answer


def reply(address: Sequence[Any], status: int, message: str, answer: Message | None, timeout: float) -> None:
    """Engine's end of `HttpLine`: leave an answer in the sender's store."""
    host, port, key = address
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout))
    store.set(key, json.dumps({"status": status, "message": message, "answer": answer or {}}))


def _packet(header: str) -> str:
    """Return `[(header, an empty tensor)]` as SGLang's deserializer reads it, with nothing that is of one node."""
    return base64.b64encode(pickle.dumps([(header, torch.zeros(0, dtype=torch.uint8))])).decode("ascii")


def connect(info: EngineInfo, store: TCPStore, intakes: Mapping[int, Intakes], timeout: float) -> Line:
    """Return the line to an engine. Raises TransportError if it is in a place that no line goes to, or is not there."""
    if info.endpoint.startswith(PREFIX):
        return LocalLine(info, intakes[info.index])
    if info.endpoint.startswith(HTTP):
        return HttpLine(info, store, timeout)
    if info.endpoint.startswith(TCP):
        return SocketLine(info, timeout)
    raise TransportError(unreachable(info))


def unreachable(info: EngineInfo) -> str:
    """Say that no line goes to an engine."""
    return (
        f"engine {info.index} is at {info.endpoint!r}, and over a network engines are reached at {TCP}HOST:PORT/TOKEN, "
        f"SGLang servers at {HTTP}HOST:PORT, those of the sender's process at {PREFIX}NAME"
    )


def is_reachable(info: EngineInfo) -> bool:
    """Whether a line goes to where the engine is."""
    return info.endpoint.startswith((PREFIX, HTTP, TCP))


def own_address(infos: Sequence[EngineInfo]) -> str:
    """Return the address of this node on the network that the engines are on.

    Raises EngineGone if there is no route to an engine's address.
    """
    hosts = [urlsplit(info.endpoint).hostname for info in infos if not info.endpoint.startswith(PREFIX)]
    for info, host in zip(infos, hosts, strict=False):
        found = route(host or LOOPBACK, info.endpoint)
        if not found.startswith("127."):
            return found
    return LOOPBACK


def route(host: str, endpoint: str = "") -> str:
    """Return the address of this node from which packets to `host` leave. Raises EngineGone if none could."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError as error:
            raise EngineGone(endpoint or host, f"there is no route to {host}: {error}") from error
        address: str = probe.getsockname()[0]
        return address


def host_store(address: str, timeout: float) -> TCPStore:
    """Return a store that listens on this address alone, on a port that was free and is held from the start on."""
    listening = socket.create_server((address, 0))
    port: int = listening.getsockname()[1]
    return TCPStore(
        address,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout),
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
