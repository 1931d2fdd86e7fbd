"""The engine side of a push in another process of the same node: a Unix socket, and memory that both ends map.

The socket carries small JSON messages only, nothing is ever unpickled; tensors lie in one piece of memory that the
sender hands over once for each push, on the host as an open file without a name (gone when both processes are,
however they end), on a GPU as a CUDA IPC handle. An engine of another process is reached as `unix://NODE/PATH`.
"""

from __future__ import annotations

import array
import base64
import json
import mmap
import os
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

import torch
from torch import Tensor

from milepost.errors import TransportError
from milepost.weights.local import LoadTarget, LocalReceiver
from milepost.weights.transport import Manifest, TensorSpec

SCHEME = "unix://"
ALIGNMENT = 256
"""Tensors begin at multiples of this many bytes."""
_LARGEST_MESSAGE = 2**30
_HEAD = struct.Struct("!I")

Message = dict[str, Any]
Place = tuple[str, tuple[int, ...], str, int]
"""Name, shape, dtype and offset in bytes of a tensor in the shared memory."""


def socket_endpoint(node: str, path: Path) -> str:
    """Return the endpoint of the engine that serves the socket `path` on `node`."""
    return f"{SCHEME}{node}{path}"


def parse_endpoint(endpoint: str) -> tuple[str, Path]:
    """Return node and socket path of a `unix://NODE/PATH` endpoint. Raises TransportError if it is none."""
    parts = urlsplit(endpoint)
    if not endpoint.startswith(SCHEME) or not parts.netloc or not parts.path:
        raise TransportError(f"{endpoint!r} is not the endpoint of an engine in another process ({SCHEME}NODE/PATH)")
    return parts.netloc, Path(parts.path)


class SharedMemory:
    """A piece of memory that one process fills and another reads, as one flat tensor of bytes."""

    def __init__(self, data: Tensor, descriptor: int | None = None) -> None:
        self.data = data
        """[n] uint8."""
        self._descriptor = descriptor

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> SharedMemory:
        """Take new memory on a GPU, or on the host for a CPU."""
        if device.type == "cuda":
            return cls(torch.empty(num_bytes, dtype=torch.uint8, device=device))
        with tempfile.TemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as file:
            os.truncate(file.fileno(), num_bytes)
            return cls(_map(file.fileno(), num_bytes), os.dup(file.fileno()))

    def handle(self) -> tuple[Message, list[int]]:
        """Return what another process needs to map the memory: a message, and descriptors to send along."""
        message: Message = {"op": "memory", "bytes": len(self.data)}
        if self._descriptor is not None:
            return message, [self._descriptor]
        shared = cast("Any", self.data.untyped_storage())._share_cuda_()
        packed = [{"base64": base64.b64encode(x).decode()} if isinstance(x, bytes) else x for x in shared]
        return {**message, "cuda": packed, "offset": self.data.storage_offset()}, []

    @classmethod
    def open(cls, message: Message, descriptors: Sequence[int]) -> SharedMemory:
        """Map the memory that `handle` described."""
        num_bytes = int(message["bytes"])
        if "cuda" not in message:
            if len(descriptors) != 1:
                raise TransportError(f"{len(descriptors)} descriptors came with host memory, expected 1")
            return cls(_map(descriptors[0], num_bytes))
        shared = [base64.b64decode(x["base64"]) if isinstance(x, dict) else x for x in message["cuda"]]
        # The number of a GPU is each process's own; engine and sender share one, this process's first.
        shared[0] = torch.cuda.current_device()
        storage = cast("Any", torch.UntypedStorage)._new_shared_cuda(*shared)
        data = torch.empty(0, dtype=torch.uint8, device="cuda")
        return cls(data.set_(storage, int(message["offset"]), (num_bytes,), (1,)))

    def view(self, place: Place) -> Tensor:
        """Return the tensor at a place. Raises TransportError if it reaches beyond the memory."""
        name, shape, dtype, offset = place
        num_bytes = TensorSpec(name, shape, dtype).num_bytes
        if offset < 0 or offset % ALIGNMENT or offset + num_bytes > len(self.data):
            raise TransportError(f"tensor {name!r} lies at {offset} + {num_bytes} of {len(self.data)} shared bytes")
        return self.data[offset : offset + num_bytes].view(getattr(torch, dtype)).view(shape)

    def close(self) -> None:
        """Let go of the memory; it is freed when the other end has, too."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self.data = self.data.new_empty(0)


def _map(descriptor: int, num_bytes: int) -> Tensor:
    """Map an open file; the mapping lives as long as the tensor does."""
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)


def place_tensors(tensors: Sequence[tuple[str, Tensor]]) -> tuple[list[Place], int]:
    """Lay tensors out one after the other; return their places and the bytes they take together."""
    places: list[Place] = []
    offset = 0
    for name, tensor in tensors:
        places.append((name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset))
        num_bytes = tensor.numel() * tensor.element_size()
        offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return places, offset


class SocketReceiver:
    """Sender's end: implements `milepost.weights.transport.Receiver` for an engine of another process of this node.

    Args:
        path: the engine's socket.
        device: where shared memory is taken: the GPU that sender and engine share, or the CPU.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._device = device
        self._path = path
        self._memory: SharedMemory | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise TransportError(f"no engine answers at {path}: {error}") from error

    def prepare(self, manifest: Manifest) -> None:
        """Fence the engine and expect these tensors."""
        tensors = [asdict(spec) for spec in manifest.tensors]
        self._ask({"op": "prepare", "version": manifest.version, "tensors": tensors})

    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy tensors into the shared memory and let the engine take them from there."""
        places, num_bytes = place_tensors(tensors)
        if self._memory is None or num_bytes > len(self._memory.data):
            if self._memory is not None:
                self._memory.close()
            self._memory = SharedMemory.allocate(num_bytes, self._device)
            self._ask(*self._memory.handle())
        for place, (_, tensor) in zip(places, tensors, strict=True):
            self._memory.view(place).copy_(tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._ask({"op": "receive", "tensors": places})

    def commit(self, version: int) -> None:
        """Serve the new version. Raises TransportError, and the engine stays fenced, unless every tensor arrived."""
        self._ask({"op": "commit", "version": version})

    def close(self) -> None:
        """Hang up and free the memory; an engine that has not committed stays fenced."""
        self._socket.close()
        if self._memory is not None:
            self._memory.close()

    def _ask(self, message: Message, descriptors: Sequence[int] = ()) -> None:
        try:
            _send(self._socket, message, descriptors)
            answer, _ = _receive(self._socket)
        except OSError as error:
            raise TransportError(f"the engine at {self._path} went away during the push: {error}") from error
        if "error" in answer:
            raise TransportError(answer["error"])


class TargetServer:
    """Engine's end: lets senders of this node push into an engine of this process, one at a time.

    The socket lies in a folder that only this user may enter. Everything the engine is asked runs where its other
    calls run: `submit(function)` gives it there and returns a future.
    """

    def __init__(self, target: LoadTarget, submit: Callable[[Callable[[], None]], Future[None]]) -> None:
        self._receiver = LocalReceiver(target)
        self._submit = submit
        self._folder = Path(tempfile.mkdtemp(prefix="milepost-engine-"))
        self.path = self._folder / "push.sock"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(self.path))
        self._socket.listen()
        self._thread = threading.Thread(target=self._serve, name="push server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more pushes."""
        # Closing does not wake a thread that waits in accept; shutting down does.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        shutil.rmtree(self._folder)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                self._converse(connection)

    def _converse(self, connection: socket.socket) -> None:
        """Answer one sender until it hangs up."""
        memory: SharedMemory | None = None
        while True:
            try:
                message, descriptors = _receive(connection)
            except (OSError, ValueError):
                return  # hung up, or no sender of ours; without a commit the engine stays fenced
            answer: Message = {}
            try:
                if message["op"] == "memory":
                    memory = SharedMemory.open(message, descriptors)
                else:
                    self._submit(self._act(message, memory)).result()
            except Exception as error:  # noqa: BLE001  the sender is who has to know
                known = isinstance(error, TransportError)
                answer = {"error": str(error) if known else f"the engine failed: {type(error).__name__}: {error}"}
            finally:
                for descriptor in descriptors:
                    os.close(descriptor)
            try:
                _send(connection, answer)
            except OSError:
                return

    def _act(self, message: Message, memory: SharedMemory | None) -> Callable[[], None]:
        """Turn a message into what is to be done in the engine's thread."""

        def act() -> None:
            match message:
                case {"op": "prepare", "version": version, "tensors": tensors}:
                    specs = [TensorSpec(t["name"], tuple(t["shape"]), t["dtype"], t["digest"]) for t in tensors]
                    self._receiver.prepare(Manifest(int(version), tuple(specs)))
                case {"op": "receive", "tensors": tensors}:
                    if memory is None:
                        raise TransportError("tensors came without shared memory")
                    views = [(n, memory.view((n, tuple(shape), dtype, offset))) for n, shape, dtype, offset in tensors]
                    self._receiver.receive(views)
                    if memory.data.is_cuda:
                        # The sender fills the memory anew as soon as it is answered.
                        torch.cuda.synchronize(memory.data.device)
                case {"op": "commit", "version": version}:
                    self._receiver.commit(int(version))
                case _:
                    raise TransportError(f"message {message.get('op')!r} is not understood")

        return act


def _send(connection: socket.socket, message: Message, descriptors: Sequence[int] = ()) -> None:
    body = json.dumps(message).encode()
    head = _HEAD.pack(len(body))
    if descriptors:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
        connection.sendmsg([head], rights)
    else:
        connection.sendall(head)
    connection.sendall(body)


def _receive(connection: socket.socket) -> tuple[Message, list[int]]:
    """Return one message and the descriptors that came with it.

    Raises ConnectionError if the other side hung up, ValueError for what is no message.
    """
    head, descriptors, _, _ = socket.recv_fds(connection, _HEAD.size, 1)
    head += _read(connection, _HEAD.size - len(head))
    (size,) = _HEAD.unpack(head)
    if size > _LARGEST_MESSAGE:
        raise ValueError(f"a message of {size} bytes was announced, more than {_LARGEST_MESSAGE}")
    message = json.loads(_read(connection, size))
    if not isinstance(message, dict):
        raise ValueError("a message is not a JSON object")
    return message, list(descriptors)


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(size - len(parts))
        if not part:
            raise ConnectionError("the other side hung up")
        parts += part
    return bytes(parts)
