"""The two sides of a weight push, and what passes between them.

The controller opens a transport once and gets a serialisable `Address`. For every push each trainer rank calls
`sender(address, rank).push(version, source)`. A push has three acts: prepare (the engine is fenced and learns the
manifest), push (tensors arrive), commit (the engine checks that all of them did and serves the new version). An engine
that has not committed gets no requests. A transport never knows a model: the source yields Hugging Face names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RankInfo:
    """One trainer rank: where it stands and its parallel coordinates."""

    rank: int
    node: str = "localhost"
    device: str = "cpu"
    """GPU UUID, or `cpu`."""
    tensor: int = 0
    pipeline: int = 0
    context: int = 0
    expert: int = 0
    data: int = 0


@dataclass(frozen=True, slots=True)
class World:
    """All trainer ranks."""

    ranks: tuple[RankInfo, ...]


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One engine as a transport sees it."""

    index: int
    endpoint: str
    """`local:NAME` for an engine in this process, otherwise a URL on loopback or the private network."""
    devices: tuple[str, ...] = ("cpu",)
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    node: str = "localhost"
    """Node it stands on, named as in `RankInfo`."""


@dataclass(frozen=True, slots=True)
class Address:
    """How ranks reach engines; plain data, so that it survives pickling and JSON."""

    transport: str
    engines: tuple[EngineInfo, ...]
    world: World
    verify: bool = False
    """Hash every tensor at both ends and compare before the commit."""
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a push."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """As in `str(tensor.dtype)` without `torch.`."""
    digest: str | None = None
    """SHA-256 of the tensor's bytes, when verifying."""

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        size: int = getattr(torch, self.dtype).itemsize
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a push will carry, in order."""

    version: int
    tensors: tuple[TensorSpec, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class Shard:
    """A slice of a Hugging Face tensor that one rank holds."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    slices: tuple[tuple[int, int], ...]
    """Start and stop along each dimension."""
    view: Tensor


class WeightSource(Protocol):
    """The kernel's side of a push: weights under Hugging Face names."""

    def specs(self) -> Sequence[TensorSpec]:
        """Names, shapes and dtypes of all tensors, in the order `tensors` yields them, without digests."""
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, gathered over tensor, pipeline and expert parallelism; called on all ranks."""
        ...

    def shards(self) -> Iterator[Shard]:
        """Yield the slices this rank holds."""
        ...


@runtime_checkable
class StagedSource(WeightSource, Protocol):
    """A source that can spare gathering over pipeline stages, for transports that send from each of them."""

    def stage_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors that are this rank's stage's to send, each tensor of the push at one stage.

        Gathered over tensor and expert parallelism; called on all ranks.
        """
        ...


@dataclass(frozen=True, slots=True)
class PushReport:
    """What one push cost."""

    version: int
    num_bytes: int
    seconds: float
    engines: tuple[int, ...]


class Sender(Protocol):
    """Trainer-rank side of a transport."""

    def push(self, version: int, source: WeightSource, engines: Collection[int] | None = None) -> PushReport:
        """Carry the source's weights to these engines (default all): prepare, push, commit.

        Raises TransportError if an engine did not commit; that engine stays fenced.
        """
        ...


class Receiver(Protocol):
    """Engine side: takes tensors in and decides whether a push was whole."""

    def prepare(self, manifest: Manifest) -> None:
        """Fence the engine and expect these tensors."""
        ...

    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Take tensors in. Raises TransportError for one that the manifest does not name."""
        ...

    def commit(self, version: int) -> None:
        """Serve the new version. Raises TransportError, and stays fenced, unless every tensor arrived."""
        ...


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's bytes in row-major order."""
    flat = tensor.detach().contiguous().cpu().view(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().data).hexdigest()
