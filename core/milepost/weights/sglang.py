"""Weight pushes to a SGLang server over HTTP: only handles travel, tensors stay in the memory both processes map.

Tensors are written one behind the other into a buffer of device memory, whose handle (a CUDA IPC handle, or the name of
shared memory on a CPU) goes to `/update_weights_from_tensor`. Inside the server `milepost.rollout.sglang.receiver`
takes them in. What it makes of them it writes to the front of the same buffer, because SGLang ends a server whose
weight loader raises, and reports nothing else of it.

Buffer: one verdict of `VERDICT_BYTES` for each tensor-parallel rank of the engine, then the tensors, each at a multiple
of `ALIGNMENT`. A verdict is a byte (`PENDING`, `ACCEPTED`, `REFUSED`), the length of a message as 4 bytes
little-endian, and the message in UTF-8.
"""

from __future__ import annotations

import base64
import http.client
import io
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

import torch
import torch.multiprocessing
from torch import Tensor

from milepost.errors import EngineGone, TransportError
from milepost.weights.transport import Manifest, TensorSpec

PREFIX: Final = "http://"
VERDICT_BYTES: Final = 4096
ALIGNMENT: Final = 256
PENDING, ACCEPTED, REFUSED = 0, 1, 2
FENCED: Final = "fenced"
"""Weight version a server answers with between prepare and commit."""

# The path of the function is wire format: SGLang finds it by this name.
LOADER: Final = "milepost.rollout.sglang.receiver.load"


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one tensor lies in the buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    """In bytes from the front of the buffer."""

    @property
    def num_bytes(self) -> int:
        """Size in bytes."""
        return TensorSpec(self.name, self.shape, self.dtype).num_bytes

    def view(self, buffer: Tensor) -> Tensor:
        """Return the tensor inside a buffer [n] uint8."""
        flat = buffer[self.start : self.start + self.num_bytes]
        return flat.view(getattr(torch, self.dtype)).reshape(self.shape)


class Buffer:
    """Device memory that carries one act of a push at a time; it grows as needed and is reused.

    On a GPU it is allocated like any tensor, and so must not be made inside a memory saver's region or with
    `expandable_segments`: neither can be opened by another process.
    """

    def __init__(self, device: torch.device, tensor_parallel: int = 1) -> None:
        self._verdicts = tensor_parallel * VERDICT_BYTES
        # On the engine's own device from the first act on: memory of another would reach it as a copy, and its verdict
        # would never come back.
        self._memory = torch.zeros(self._verdicts, dtype=torch.uint8, device=device)

    def pack(self, tensors: Sequence[tuple[str, Tensor]]) -> list[Slot]:
        """Copy tensors in; return where they lie."""
        slots = []
        end = self._verdicts
        for name, tensor in tensors:
            slot = Slot(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), end)
            slots.append(slot)
            end += -(-slot.num_bytes // ALIGNMENT) * ALIGNMENT
        memory = self._reserve(end)
        for slot, (_, tensor) in zip(slots, tensors, strict=True):
            slot.view(memory).copy_(tensor)
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)  # the reader has another stream
        return slots

    def packets(self, header: Mapping[str, Any]) -> list[str]:
        """Clear the verdicts; return for each rank of the engine what it is to be sent: base64 text."""
        memory = self._memory
        memory[: self._verdicts] = PENDING
        ranks = range(self._verdicts // VERDICT_BYTES)
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)
        return [_serialize(json.dumps({**header, "verdict": rank * VERDICT_BYTES}), memory) for rank in ranks]

    def check(self, endpoint: str) -> None:
        """Read the verdicts. Raises TransportError with the message of the first rank that refused."""
        memory = self._memory
        for rank in range(self._verdicts // VERDICT_BYTES):
            status, message = read_verdict(memory[rank * VERDICT_BYTES :][:VERDICT_BYTES])
            if status != ACCEPTED:
                raise TransportError(f"the engine at {endpoint} refused: {message or 'it gave no answer'}")

    def _reserve(self, num_bytes: int) -> Tensor:
        if len(self._memory) < num_bytes:
            self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=self._memory.device)
        return self._memory


def write_verdict(area: Tensor, status: int, message: str = "") -> None:
    """Write a verdict into its area [VERDICT_BYTES] uint8; a longer message is cut."""
    text = message.encode("utf-8")[: VERDICT_BYTES - 5].decode("utf-8", errors="ignore").encode("utf-8")
    # The status comes last: a reader never finds it before its message.
    area[5 : 5 + len(text)] = torch.tensor(list(text), dtype=torch.uint8, device=area.device)
    area[1:5] = torch.tensor(list(len(text).to_bytes(4, "little")), dtype=torch.uint8, device=area.device)
    area[0] = status


def read_verdict(area: Tensor) -> tuple[int, str]:
    """Return status and message of a verdict."""
    raw = bytes(area.cpu().tolist())
    length = int.from_bytes(raw[1:5], "little")
    return raw[0], raw[5 : 5 + length].decode("utf-8")


def _serialize(header: str, memory: Tensor) -> str:
    """Return `[(header, memory)]` as SGLang's deserializer reads it."""
    stream = io.BytesIO()
    if memory.is_cuda:
        # Names the device by UUID: the two processes may number their GPUs differently. Not run by the tests.
        from sglang.srt.utils.patch_torch import monkey_patch_torch_reductions

        monkey_patch_torch_reductions()
        ForkingPickler(stream).dump([(header, memory)])
    else:
        with _shared_by_name():
            ForkingPickler(stream).dump([(header, memory)])
    return base64.b64encode(stream.getvalue()).decode("ascii")


@contextmanager
def _shared_by_name() -> Iterator[None]:
    """Share CPU memory by its name in the file system: descriptors cannot be passed to a process that is no child."""
    before = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.multiprocessing.set_sharing_strategy(before)  # type: ignore[no-untyped-call]


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest as JSON data."""
    return {"version": manifest.version, "tensors": [asdict(spec) for spec in manifest.tensors]}


def manifest_of(data: Mapping[str, Any]) -> Manifest:
    """Return the manifest that `manifest_json` made the data of."""
    specs = [TensorSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in data["tensors"]]
    return Manifest(data["version"], tuple(specs))


class HttpReceiver:
    """Implements `milepost.weights.transport.Receiver`: hands everything to the receiver inside the server.

    One process serves all ranks of an engine here, which must share its device. Where they have devices of their own,
    somebody on each has to make the packet for the rank there; `hand_over` is the place to bring these together.
    """

    def __init__(
        self, endpoint: str, device: torch.device, *, tensor_parallel: int = 1, timeout: float = 600.0
    ) -> None:
        """`device` is the one it shares with the engine; `timeout` how many seconds the server may take to answer."""
        self._endpoint = endpoint
        self._timeout = timeout
        self._buffer = Buffer(device, tensor_parallel)

    def prepare(self, manifest: Manifest) -> None:
        """Fence the server and announce what is to come. Raises TransportError if it does not take a push."""
        self.hand_over(self._buffer.packets({"act": "prepare", "manifest": manifest_json(manifest)}), version=FENCED)

    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Have tensors taken in. Raises TransportError, and the server stays fenced, if one is refused."""
        slots = self._buffer.pack(tensors)
        self.hand_over(self._buffer.packets({"act": "load", "slots": [asdict(slot) for slot in slots]}))

    def commit(self, version: int) -> None:
        """Have the server check that all is there, drop its cache, and serve the new version.

        Raises TransportError, and the server stays fenced, if something is missing or wrong.
        """
        self.hand_over(self._buffer.packets({"act": "commit", "version": version}))
        self.serve(version)

    def hand_over(self, packets: Sequence[str], version: str | None = None) -> None:
        """Have one act done, and serve `version` from then on. Raises TransportError if the engine refuses it."""
        self.post(packets, version)
        self._buffer.check(self._endpoint)

    def serve(self, version: int) -> None:
        """Let the server answer with the version, of which it holds the whole."""
        # What the cache holds was computed with the old weights.
        request(self._endpoint, "/flush_cache", {}, self._timeout)
        body = {"new_version": str(version), "abort_all_requests": False}
        request(self._endpoint, "/update_weight_version", body, self._timeout)

    def post(self, packets: Sequence[str], version: str | None = None) -> None:
        """Send one packet for each rank of the engine."""
        body: dict[str, Any] = {"serialized_named_tensors": list(packets), "load_format": LOADER, "flush_cache": False}
        if version is not None:
            body["weight_version"] = version
        request(self._endpoint, "/update_weights_from_tensor", body, self._timeout)


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""Engines are on loopback or the private network, never behind a proxy."""


def request(endpoint: str, path: str, body: Mapping[str, Any], timeout: float) -> bytes:
    """Post JSON and return the answer.

    Raises EngineGone if the server does not answer within `timeout` seconds, TransportError if it says no.
    """
    message = urllib.request.Request(
        endpoint + path, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    try:
        with _direct.open(message, timeout=timeout) as response:
            content: bytes = response.read()
            return content
    except urllib.error.HTTPError as error:
        said = error.read().decode("utf-8", errors="replace")[:2000]
        raise TransportError(f"{path} of the engine at {endpoint} failed with status {error.code}: {said}") from error
    except (OSError, http.client.HTTPException) as error:
        raise EngineGone(
            endpoint,
            f"the engine at {endpoint} did not answer {path} (limit {timeout:.0f} s): {error!r}; it is fenced until a "
            "whole push has gone through",
        ) from error
