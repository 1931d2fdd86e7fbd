"""What a transport is tried on: engines that remember what they were given, and a source that can fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from milepost.weights.local import local_endpoint, register_target, unregister_target
from milepost.weights.transport import EngineInfo, Shard, TensorSpec


class RecordingEngine:
    """Implements `milepost.weights.local.LoadTarget`; keeps copies of what it was given, and serves whole sets only."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = frozenset(names)
        """The tensors its model has."""
        self.version = -1
        self.fenced = True
        self.served: dict[str, Tensor] = {}
        """What it serves, or would if it were not fenced."""
        self.dies_after: int | None = None
        """Number of tensors after which it fails."""
        self._incoming: dict[str, Tensor] = {}

    def fence(self) -> None:
        """Serve nothing until `serve`."""
        self.fenced = True
        self._incoming = {}

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Keep copies. Raises KeyError for a tensor the model has not."""
        for name, tensor in tensors:
            if self.dies_after is not None and len(self._incoming) >= self.dies_after:
                raise RuntimeError("the engine died")
            if name not in self.names:
                raise KeyError(f"the model has no tensor {name!r}")
            self._incoming[name] = tensor.detach().clone()

    def serve(self, version: int) -> None:
        """Serve what was loaded. Raises KeyError, and stays fenced, if a tensor is missing."""
        missing = sorted(self.names - self._incoming.keys())
        if missing:
            raise KeyError(f"the model misses {', '.join(missing)}")
        self.served, self.version, self.fenced = self._incoming, version, False
        self._incoming = {}


@contextmanager
def in_this_process(engine: RecordingEngine, index: int) -> Iterator[EngineInfo]:
    """Let an engine be reached at `local:NAME` while the body runs."""
    name = f"under-check-{index}"
    register_target(name, engine)
    try:
        yield EngineInfo(index, local_endpoint(name))
    finally:
        unregister_target(name)


def make_weights(seed: int) -> dict[str, Tensor]:
    """Return tensors of every kind that weights come in: dtypes, a scalar, a view, NaN and infinity among numbers."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    odd = random(6)
    odd[:4] = torch.tensor([float("nan"), float("-inf"), -0.0, 1e-42])
    return {
        "bfloat16": random(5, 7).bfloat16(),
        "odd_numbers": odd,
        "float16": random(3, 2, 4).half(),
        "transposed": random(8, 3).t(),
        "scalar": random(1).reshape(()),
        "larger": random(300, 211),
        "last": random(9),
    }


@dataclass(frozen=True)
class Source:
    """Implements `milepost.weights.transport.WeightSource` over plain tensors; what it announces may be a lie."""

    weights: Mapping[str, Tensor]
    announced: Mapping[str, Tensor] | None = None
    """What `specs` speaks of; default the weights."""
    fails_after: int | None = None
    """Number of tensors after which reading it fails."""

    def failing(self, after: int) -> Source:
        """Return this source, failing after some tensors."""
        return replace(self, fails_after=after)

    def specs(self) -> Sequence[TensorSpec]:
        """Names, shapes and dtypes, without digests."""
        announced = self.weights if self.announced is None else self.announced
        return [
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in announced.items()
        ]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors. Raises OSError where it was told to fail."""
        for number, pair in enumerate(self.weights.items()):
            if number == self.fails_after:
                raise OSError("the sender died")
            yield pair

    def shards(self) -> Iterator[Shard]:
        """Yield the same tensors, each as the one shard it has."""
        for name, tensor in self.tensors():
            shape = tuple(tensor.shape)
            yield Shard(name, shape, tuple((0, extent) for extent in shape), tensor)


class CountingSource(Source):
    """A source that knows how many tensors were read from it."""

    reads: int = 0

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, counting them."""
        for pair in super().tensors():
            object.__setattr__(self, "reads", self.reads + 1)
            yield pair


def same_bits(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> list[str]:
    """Return the names under which two sets of tensors differ in shape, dtype or any bit."""
    return [name for name in sorted({*first, *second}) if not _equal(first.get(name), second.get(name))]


def _equal(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None or first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(*(x.detach().cpu().contiguous().view(-1).view(torch.uint8) for x in (first, second)))
