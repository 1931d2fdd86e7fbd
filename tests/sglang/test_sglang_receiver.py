"""The receiver inside a server, with a small model that fuses, pads and transforms as SGLang's do; no server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from milepost.rollout.sglang import receiver
from milepost.weights import sglang as wire
from milepost.weights.sglang import (
    ACCEPTED,
    ALIGNMENT,
    PENDING,
    REFUSED,
    VERDICT_BYTES,
    Buffer,
    manifest_json,
    manifest_of,
    read_verdict,
    write_verdict,
)
from milepost.weights.transport import Manifest, TensorSpec, digest
from torch import Tensor, nn

HIDDEN, VOCAB, PADDED = 4, 6, 8


class Fused(nn.Module):
    """q, k and v in one parameter, an embedding with padding, a norm, and a scale that is computed from its tensor."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(4 * HIDDEN, HIDDEN, dtype=dtype))
        self.embed = nn.Parameter(torch.ones(PADDED, HIDDEN, dtype=dtype))
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=dtype))
        self.num_loads = 0
        self.spoil: str | None = None

    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        self.num_loads += 1
        rows = {"q": (0, 8), "k": (8, 12), "v": (12, 16)}
        for name, tensor in weights:
            if name in rows:
                start, stop = rows[name]
                part = self.qkv.data[start:stop]
                assert part.shape == tensor.shape, f"{tuple(part.shape)} is not {tuple(tensor.shape)}"
                part.copy_(tensor)
            elif name == "embed":
                self.embed.data[:VOCAB].copy_(tensor)
                self.embed.data[VOCAB:].fill_(0)
            elif name == "norm":
                self.norm.data.copy_(tensor * 2 if self.spoil == "norm" else tensor)


def weights(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q": (8, 4), "k": (4, 4), "v": (4, 4), "embed": (VOCAB, HIDDEN), "norm": (HIDDEN,)}
    return [(name, torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()]


def manifest(named: Sequence[tuple[str, Tensor]], version: int = 1, verify: bool = False) -> Manifest:
    return Manifest(
        version,
        tuple(
            TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch."), digest(t) if verify else None)
            for n, t in named
        ),
    )


class Wire:
    """The sender's end, calling the receiver as SGLang does, in this process."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.buffer = Buffer(torch.device("cpu"))

    def act(self, header: dict[str, Any]) -> str | None:
        """Do an act; return the refusal, if any."""
        self.buffer.packets(header)  # clears the verdict
        memory = self.buffer._memory
        assert memory is not None
        receiver.load(self.model, [(json.dumps({**header, "verdict": 0}), memory)])
        status, message = read_verdict(memory[:VERDICT_BYTES])
        assert status in (ACCEPTED, REFUSED)
        return message if status == REFUSED else None

    def prepare(self, expected: Manifest) -> str | None:
        return self.act({"act": "prepare", "manifest": manifest_json(expected)})

    def load(self, named: Sequence[tuple[str, Tensor]]) -> str | None:
        return self.act({"act": "load", "slots": [asdict(slot) for slot in self.buffer.pack(named)]})

    def commit(self, version: int = 1) -> str | None:
        return self.act({"act": "commit", "version": version})

    def push(self, named: Sequence[tuple[str, Tensor]], verify: bool = False) -> str | None:
        return (
            self.prepare(manifest(named, verify=verify))
            or self.load(named[:3])
            or self.load(named[3:])
            or self.commit()
        )


def check(model: Fused, named: Sequence[tuple[str, Tensor]]) -> None:
    given = dict(named)
    assert torch.equal(model.qkv, torch.cat([given["q"], given["k"], given["v"]]).to(model.qkv.dtype))
    assert torch.equal(model.embed, torch.cat([given["embed"], torch.zeros(2, HIDDEN)]).to(model.embed.dtype))
    assert torch.equal(model.norm, given["norm"].to(model.norm.dtype))


def test_tensors_lie_aligned_behind_the_verdict() -> None:
    buffer = Buffer(torch.device("cpu"), tensor_parallel=2)
    slots = buffer.pack([("a", torch.arange(3.0)), ("b", torch.arange(5, dtype=torch.int64)), ("c", torch.ones(1))])
    assert [slot.start for slot in slots] == [2 * VERDICT_BYTES + i * ALIGNMENT for i in range(3)]
    assert slots[1].view(buffer._memory).tolist() == [0, 1, 2, 3, 4]


def test_every_act_of_a_push_travels_in_memory_of_the_engines_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "_serialize", lambda header, memory: memory.device.type)
    buffer = Buffer(torch.device("meta"))
    assert buffer.packets({"act": "prepare"}) == ["meta"]
    buffer.pack([("a", torch.zeros(3, device="meta"))])
    assert buffer.packets({"act": "load"}) == ["meta"]


def test_verdicts_and_manifests_survive_the_wire() -> None:
    area = torch.zeros(VERDICT_BYTES, dtype=torch.uint8)
    assert read_verdict(area) == (PENDING, "")
    write_verdict(area, REFUSED, "tensor 'ä' is missing")
    assert read_verdict(area) == (REFUSED, "tensor 'ä' is missing")
    write_verdict(area, REFUSED, "ä" * VERDICT_BYTES)  # cut between letters
    assert read_verdict(area) == (REFUSED, "ä" * ((VERDICT_BYTES - 5) // 2))
    expected = manifest(weights(), verify=True)
    assert manifest_of(json.loads(json.dumps(manifest_json(expected)))) == expected


@pytest.mark.parametrize("verify", [False, True])
def test_the_models_loader_runs_once_and_its_copies_are_played_from_then_on(verify: bool) -> None:
    model = Fused()
    wire = Wire(model)
    for seed in range(3):
        named = weights(seed)
        assert wire.push(named, verify) is None
        check(model, named)
    assert model.num_loads == 2  # one for each bucket of the first push


def test_other_buckets_and_orders_use_the_same_routes() -> None:
    model = Fused()
    wire = Wire(model)
    assert wire.push(weights(0)) is None
    named = list(reversed(weights(1)))
    assert wire.push(named) is None
    check(model, named)
    assert model.num_loads == 2


def test_another_dtype_in_the_engine_is_converted_and_verified_as_such() -> None:
    model = Fused(torch.bfloat16)
    wire = Wire(model)
    for seed in range(2):
        named = weights(seed)
        assert wire.push(named, verify=True) is None
        check(model, named)
    # and another dtype on the way finds the routes anew
    named = weights(5, torch.bfloat16)
    assert wire.push(named, verify=True) is None
    check(model, named)
    assert model.num_loads == 4


def test_what_the_loader_transforms_is_left_to_it_and_cannot_be_verified() -> None:
    model = Fused()
    model.spoil = "norm"
    wire = Wire(model)
    for seed in range(2):
        named = weights(seed)
        assert wire.push(named) is None
        assert torch.equal(model.norm, 2 * dict(named)["norm"])
    assert model.num_loads == 3
    assert "tensor 'norm' cannot be verified" in (wire.push(weights(2), verify=True) or "")


def test_a_write_behind_the_receivers_back_is_found_and_named() -> None:
    model = Fused()
    wire = Wire(model)
    named = weights()
    assert wire.prepare(manifest(named, verify=True)) is None
    assert wire.load(named) is None
    model.qkv.data[9, 2] += 1.0  # a row of k
    assert wire.commit() == "tensor 'k' differs in the engine from what was sent (its part of shape [4, 4])"
    assert wire.commit() == "commit of version 1, but none is under way"


def test_refusals_name_the_tensor_and_end_the_push() -> None:
    named = weights()
    longer = [*named, ("other", torch.ones(2))]
    wrong = [named[0], ("k", torch.ones(3, 4)), *named[2:]]
    swapped = manifest(named, verify=True)
    swapped = replace(swapped, tensors=(replace(swapped.tensors[0], digest="0" * 64), *swapped.tensors[1:]))
    cases: list[tuple[Manifest, list[tuple[str, Tensor]], str]] = [
        (manifest(longer), longer, "the engine's model has no place for tensor 'other' (1 such in this bucket)"),
        (manifest(wrong), wrong, "the engine's model cannot take tensor 'k' of shape [3, 4]: AssertionError"),
        (manifest(named[:2]), named, "tensor 'v' is not in the manifest, or came twice"),
        (manifest(named), [named[0], *named], "tensor 'q' is not in the manifest, or came twice"),
        (manifest(named), wrong, "tensor 'k' is float32[3, 4], the manifest says float32[4, 4]"),
        (swapped, named, "tensor 'q' arrived with other bytes than were sent"),
    ]
    for expected, sent, message in cases:
        wire = Wire(Fused())
        assert wire.prepare(expected) is None
        assert (wire.load(sent) or "").startswith(message)
        assert "prepare again" in (wire.load(named[:1]) or "")
        assert wire.commit() == "commit of version 1, but none is under way"
        assert wire.push(named, verify=True) is None


def test_an_incomplete_or_mistaken_commit_is_refused() -> None:
    named = weights()
    wire = Wire(Fused())
    assert "came without a push" in (wire.load(named) or "")
    assert wire.prepare(manifest(named)) is None
    assert wire.load(named[:-1]) is None
    assert wire.commit() == "version 1 is incomplete: 1 tensors missing (norm)"
    assert wire.prepare(manifest(named)) is None
    assert wire.load(named) is None
    assert wire.commit(2) == "commit of version 2, but version 1 was begun"


def test_verifying_finds_a_parameter_that_the_push_forgot() -> None:
    forgot = weights()[:-1]
    wire = Wire(Fused())
    assert wire.push(forgot) is None
    assert wire.push(forgot, verify=True) == "no tensor of the push went into the engine's parameter 'norm'"
