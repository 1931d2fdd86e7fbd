"""The engine side of a push in another process: a socket, and on the same node memory that both ends map.

The socket carries small JSON messages only, nothing is ever unpickled; tensors lie in one piece of memory that the
sender hands over once for each push, on the host as an open file without a name (gone when both processes are,
however they end), on a GPU as a CUDA IPC handle. An engine of another process is reached as `unix://NODE/PATH`.

Where trainer and engines have devices of their own, the socket is one of TCP (`tcp://HOST:PORT/TOKEN`), on the address
of the private network alone, and nobody is heard who does not say the token first. Bytes then come through an intake
(`milepost.weights.intake`).
"""

from __future__ import annotations

import array
import base64
import hmac
import json
import mmap
import os
import secrets
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

from milepost.errors import EngineGone, TransportError
from milepost.weights.intake import Intakes, act
from milepost.weights.local import LoadTarget, LocalReceiver
from milepost.weights.transport import Manifest, TensorSpec

SCHEME = "unix://"
TCP = "tcp://"
HELLO_SECONDS = 5.0
"""How long whoever connects over TCP may take to say the token."""
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
    """Sender's end: implements `milepost.weights.transport.Receiver` for an engine of another process.

    Args:
        address: the engine's socket: its path, or host and port.
        device: where shared memory is taken: the GPU that sender and engine share, or the CPU.
        token: what the engine wants to hear first where its socket is one of TCP.
        timeout: seconds that an answer may take; None for any time.
    """

    def __init__(
        self, address: Path | tuple[str, int], device: torch.device, *, token: str = "", timeout: float | None = None
    ) -> None:
        self._device = device
        self._memory: SharedMemory | None = None
        self._name = str(address) if isinstance(address, Path) else f"{TCP}{address[0]}:{address[1]}"
        self._endpoint = f"{self._name}/{token}" if token else self._name
        self._socket = socket.socket(
            socket.AF_UNIX if isinstance(address, Path) else socket.AF_INET, socket.SOCK_STREAM
        )
        self._socket.settimeout(timeout)
        try:
            self._socket.connect(str(address) if isinstance(address, Path) else address)
        except OSError as error:
            self._socket.close()
            raise EngineGone(self._endpoint, f"no engine answers at {self._name}: {error}") from error
        if token:
            self.ask({"op": "hello", "token": token})

    def prepare(self, manifest: Manifest) -> None:
        """Fence the engine and expect these tensors."""
        tensors = [asdict(spec) for spec in manifest.tensors]
        self.ask({"op": "prepare", "version": manifest.version, "tensors": tensors})

    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy tensors into the shared memory and let the engine take them from there."""
        places, num_bytes = place_tensors(tensors)
        if self._memory is None or num_bytes > len(self._memory.data):
            if self._memory is not None:
                self._memory.close()
            self._memory = SharedMemory.allocate(num_bytes, self._device)
            self.ask(*self._memory.handle())
        for place, (_, tensor) in zip(places, tensors, strict=True):
            self._memory.view(place).copy_(tensor)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.ask({"op": "receive", "tensors": places})

    def commit(self, version: int) -> None:
        """Serve the new version. Raises TransportError, and the engine stays fenced, unless every tensor arrived."""
        self.ask({"op": "commit", "version": version})

    def close(self) -> None:
        """Hang up and free the memory; an engine that has not committed stays fenced."""
        self._socket.close()
        if self._memory is not None:
            self._memory.close()

    def ask(self, message: Message, descriptors: Sequence[int] = ()) -> Message:
        """Send a message and return the answer. Raises TransportError if it is an error, EngineGone if none comes."""
        try:
            _send(self._socket, message, descriptors)
            answer, _ = _receive(self._socket)
        except OSError as error:
            self._socket.close()  # a late answer would be taken for the next one's
            raise EngineGone(
                self._endpoint, f"the engine at {self._name} went away during the push: {error}"
            ) from error
        if "error" in answer:
            raise TransportError(answer["error"])
        return answer


class TargetServer:
    """Engine's end: lets senders push into an engine of this process, one at a time.

    The socket lies in a folder that only this user may enter; with a `host`, it is one of TCP on that address, and asks
    for a token. Everything the engine is asked runs where its other calls run: `submit(function)` gives it there and
    returns a future. Bytes are waited for elsewhere.

    Args:
        target: the engine.
        submit: runs a function where the engine's calls run.
        host: address to listen on; by default a Unix socket.
        device: where bytes from a network are taken in; the engine's.
    """

    def __init__(
        self,
        target: LoadTarget,
        submit: Callable[[Callable[[], None]], Future[None]],
        *,
        host: str | None = None,
        device: torch.device | None = None,
    ) -> None:
        self._receiver = LocalReceiver(target)
        self._submit = submit
        self._intakes = Intakes(device or torch.device("cpu"))
        self._token = secrets.token_hex(16)
        self._folder = Path(tempfile.mkdtemp(prefix="milepost-engine-"))
        self.path = self._folder / "push.sock"
        self.endpoint: str | None = None
        """`tcp://HOST:PORT/TOKEN` where it listens on a host."""
        if host is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind(str(self.path))
            self._socket.listen()
        else:
            self._socket = socket.create_server((host, 0))
            self.endpoint = f"{TCP}{host}:{self._socket.getsockname()[1]}/{self._token}"
        self._thread = threading.Thread(target=self._serve, name="push server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more pushes."""
        # Closing does not wake a thread that waits in accept; shutting down does.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        shutil.rmtree(self._folder)
        self._intakes.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return  # closed
            with connection:
                if self.endpoint is None or self._greet(connection):
                    self._converse(connection)

    def _greet(self, connection: socket.socket) -> bool:
        """Whether who connected says the token in time."""
        connection.settimeout(HELLO_SECONDS)
        try:
            message, _ = _receive(connection)
            if not hmac.compare_digest(str(message.get("token")).encode(), self._token.encode()):
                return False
            _send(connection, {})
        except (OSError, ValueError):
            return False
        connection.settimeout(None)
        return True

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
                elif message["op"] in ("probe", "open"):
                    answer = act(self._intakes, message)
                elif message["op"] == "fill":
                    bucket = SharedMemory(self._intakes.take(message["channel"], message["bytes"]))
                    self._submit(self._act({**message, "op": "receive"}, bucket)).result()
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
