"""The engine side of a push in one process: what is checked, and that nothing half-applied is served."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from milepost.errors import MilepostError, TransportError
from milepost.weights.local import LocalReceiver, find_target, local_endpoint, register_target, unregister_target
from milepost.weights.transport import Manifest, TensorSpec, digest
from torch import Tensor


class Target:
    """A model of two tensors, `a` [2] and `b` [2, 2]."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.version = -1
        self.fenced = self.busy = False

    def fence(self) -> None:
        if self.busy:
            raise RuntimeError("requests are running")
        self.fenced = True

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name not in {"a", "b"}:
                raise KeyError(f"the model has no tensor {name!r}")
            self.weights[name] = tensor.clone()

    def serve(self, version: int) -> None:
        if self.weights.keys() != {"a", "b"}:
            raise KeyError("the model misses a tensor")
        self.version, self.fenced = version, False


A, B = torch.tensor([1.0, 2.0]), torch.arange(4.0).view(2, 2)
SPECS = (TensorSpec("a", (2,), "float32"), TensorSpec("b", (2, 2), "float32"))


def test_a_whole_push_is_served() -> None:
    target = Target()
    receiver = LocalReceiver(target)
    receiver.prepare(Manifest(4, SPECS))
    assert target.fenced
    receiver.receive([("b", B)])
    receiver.receive([("a", A)])
    receiver.commit(4)
    assert (target.version, target.fenced) == (4, False)
    assert torch.equal(target.weights["a"], A) and torch.equal(target.weights["b"], B)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([("c", A)], "'c' is not in the manifest"),
        ([("a", A), ("a", A)], "'a' is not in the manifest, or came twice"),
        ([("a", A.double())], r"float64\[2\], the manifest says float32\[2\]"),
        ([("b", A)], r"float32\[2\], the manifest says float32\[2, 2\]"),
    ],
)
def test_what_the_manifest_does_not_announce_is_refused(tensors: list[tuple[str, Tensor]], message: str) -> None:
    target = Target()
    receiver = LocalReceiver(target)
    receiver.prepare(Manifest(0, SPECS))
    with pytest.raises(TransportError, match=message):
        receiver.receive(tensors)
    assert target.fenced and target.version == -1


def test_an_incomplete_push_stays_fenced_and_a_whole_one_mends_it() -> None:
    target = Target()
    receiver = LocalReceiver(target)
    receiver.prepare(Manifest(0, SPECS))
    receiver.receive([("a", A)])
    with pytest.raises(TransportError, match=r"version 0 is incomplete: 1 tensors missing \(b\)"):
        receiver.commit(0)
    assert target.fenced and target.version == -1
    receiver.prepare(Manifest(1, SPECS))
    receiver.receive([("a", A), ("b", B)])
    with pytest.raises(TransportError, match="commit of version 2, but version 1 was begun"):
        receiver.commit(2)
    assert target.fenced
    receiver.commit(1)
    assert (target.version, target.fenced) == (1, False)


def test_a_manifest_that_does_not_fit_the_model() -> None:
    target = Target()
    receiver = LocalReceiver(target)
    receiver.prepare(Manifest(0, (*SPECS, TensorSpec("c", (2,), "float32"))))
    with pytest.raises(TransportError, match="does not fit the push: the model has no tensor 'c'"):
        receiver.receive([("a", A), ("b", B), ("c", A)])
    receiver.prepare(Manifest(0, SPECS[:1]))
    target.weights.clear()
    receiver.receive([("a", A)])
    with pytest.raises(TransportError, match="incomplete: the model misses"):
        receiver.commit(0)
    assert target.fenced


def test_digests_are_compared() -> None:
    target = Target()
    receiver = LocalReceiver(target)
    specs = tuple(
        TensorSpec(spec.name, spec.shape, spec.dtype, digest(tensor))
        for spec, tensor in zip(SPECS, (A, B), strict=True)
    )
    receiver.prepare(Manifest(0, specs))
    receiver.receive([("a", A)])
    changed = B.clone()
    changed[1, 1] = changed[1, 1].nextafter(torch.tensor(9.0))
    with pytest.raises(TransportError, match="'b' arrived with other bytes"):
        receiver.receive([("b", changed)])
    assert target.fenced


def test_a_busy_engine_and_tensors_without_a_push() -> None:
    target = Target()
    receiver = LocalReceiver(target)
    with pytest.raises(TransportError, match="call prepare first"):
        receiver.receive([("a", A)])
    with pytest.raises(TransportError, match="none was begun"):
        receiver.commit(0)
    target.busy = True
    with pytest.raises(TransportError, match="takes no push: requests are running"):
        receiver.prepare(Manifest(0, SPECS))


def test_engines_are_found_by_name() -> None:
    target = Target()
    register_target("one", target)
    register_target("one", target)  # the same engine once more
    try:
        assert local_endpoint("one") == "local:one" and find_target("local:one") is target
        with pytest.raises(MilepostError, match="named 'one' is running"):
            register_target("one", Target())
        with pytest.raises(TransportError, match=r"no engine at 'local:two' in this process \(there are: local:one\)"):
            find_target("local:two")
        with pytest.raises(TransportError, match="no engine at 'one'"):
            find_target("one")
    finally:
        unregister_target("one")
    with pytest.raises(TransportError, match="there are: none"):
        find_target("local:one")


def test_a_local_engine_registers_while_it_runs() -> None:
    from milepost.rollout.local import LocalEngine
    from milepost.rollout.local.decoder import LeanDecoder

    config = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "max_position_embeddings": 8,
        "rope_theta": 1e4,
    }
    decoder = LeanDecoder(config, torch.float32, torch.device("cpu"))
    engine = LocalEngine(decoder=decoder, decode=str, end_token_ids=(), max_positions=8, name="lone")

    async def act() -> None:
        await engine.start()
        assert find_target(engine.endpoint) is engine
        await engine.stop()

    asyncio.run(act())
    with pytest.raises(TransportError):
        find_target("local:lone")
