"""The `ipc` transport between processes: a Unix socket, and memory that both ends map."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from milepost.errors import TransportError
from milepost.rollout.engine import SamplingParams
from milepost.rollout.local import LocalEngine
from milepost.rollout.local.decoder import LeanDecoder
from milepost.samples import Task
from milepost.weights.sockets import SharedMemory, SocketReceiver, TargetServer, place_tensors, socket_endpoint
from milepost.weights.source import ModuleSource
from milepost.weights.transport import EngineInfo, Manifest, RankInfo, World
from milepost_ipc.transport import IpcTransport
from transformers import Qwen3Config, Qwen3ForCausalLM

CONFIG = Qwen3Config(
    vocab_size=40,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=32,
    tie_word_embeddings=True,
)


def make_model(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(CONFIG)


class Served:
    """An engine with an event loop in a thread of its own, as another process has it."""

    def __init__(self) -> None:
        decoder = LeanDecoder(CONFIG.to_dict(), torch.float32, torch.device("cpu"))
        self.engine = LocalEngine(decoder=decoder, decode=str, end_token_ids=(), max_positions=32, name="served")
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        asyncio.run_coroutine_threadsafe(self.engine.start(), self.loop).result()
        self.server = TargetServer(self.engine, self.submit)

    def submit(self, function: Callable[[], None]) -> Future[None]:
        async def call() -> None:
            function()

        return asyncio.run_coroutine_threadsafe(call(), self.loop)

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(0, socket_endpoint("here", self.server.path))

    def greedy(self) -> list[int]:
        request = self.engine.generate(Task(0, "", (3, 4)), (3, 4), SamplingParams(8, temperature=0.0), (0,))
        sample = asyncio.run_coroutine_threadsafe(request, self.loop).result()
        return list(sample.tokens.tolist())

    def close(self) -> None:
        self.server.close()
        asyncio.run_coroutine_threadsafe(self.engine.stop(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    yield made
    made.close()


def expected(model: Qwen3ForCausalLM) -> list[int]:
    generated = model.generate(torch.tensor([[3, 4]]), do_sample=False, max_new_tokens=8, eos_token_id=None)
    return list(generated[0].tolist())


WORLD = World((RankInfo(0, node="here"), RankInfo(1, node="there", data=1)))


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 3000, 2**20])
def test_pushes_reach_the_engine(served: Served, bucket_bytes: int, verify: bool) -> None:
    transport = IpcTransport(bucket_bytes)
    address = replace(transport.open(WORLD, [served.info]), verify=verify)
    assert transport.receiver(address, 0) is None  # the engine's process listens by itself
    for version in range(2):
        model = make_model(version)
        reports = [transport.sender(address, rank).push(version, ModuleSource(model)) for rank in (0, 1)]
        size = sum(parameter.numel() * 4 for parameter in model.parameters())
        assert [(report.num_bytes, report.engines) for report in reports] == [(size, (0,)), (0, ())]
        assert served.engine.version == version
        assert served.greedy() == expected(model)


def test_a_sender_that_hangs_up_leaves_the_engine_fenced(served: Served) -> None:
    model = make_model(0)
    tensors = list(ModuleSource(model).tensors())
    sender = IpcTransport(2**20).sender(IpcTransport(2**20).open(WORLD, [served.info]), 0)
    sender.push(0, ModuleSource(model))
    half = SocketReceiver(served.server.path, torch.device("cpu"))
    half.prepare(Manifest(1, tuple(ModuleSource(model).specs())))
    half.receive(tensors[:3])
    with pytest.raises(TransportError, match=r"version 1 is incomplete: \d+ tensors missing"):
        half.commit(1)
    half.close()
    with pytest.raises(RuntimeError, match="fenced"):
        served.greedy()
    sender.push(2, ModuleSource(model))
    assert served.greedy() == expected(model)


def test_bytes_that_changed_on_the_way_are_refused(served: Served) -> None:
    source = ModuleSource(make_model(0))
    specs = tuple(replace(spec, digest="0" * 64) for spec in source.specs())
    receiver = SocketReceiver(served.server.path, torch.device("cpu"))
    receiver.prepare(Manifest(0, specs))
    with pytest.raises(TransportError, match="arrived with other bytes than were sent"):
        receiver.receive(list(source.tensors()))
    receiver.close()


def test_what_is_no_message_ends_the_conversation_and_not_the_engine(served: Served) -> None:
    for garbage in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x03[1]", b"\x00\x00\x00\x04nope"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rude:
            rude.connect(str(served.server.path))
            rude.sendall(garbage)
            assert rude.recv(1) == b""
    answers = []
    for message in ({"op": "dance"}, {"no": "op"}, {"op": "receive", "tensors": []}):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as rude:
            body = json.dumps(message).encode()
            rude.connect(str(served.server.path))
            rude.sendall(len(body).to_bytes(4) + body)
            size = int.from_bytes(rude.recv(4, socket.MSG_WAITALL))
            answers.append(json.loads(rude.recv(size, socket.MSG_WAITALL))["error"])
    assert answers == [
        "message 'dance' is not understood",
        "the engine failed: KeyError: 'op'",
        "tensors came without shared memory",
    ]
    model = make_model(0)
    transport = IpcTransport(2**20)
    transport.sender(transport.open(WORLD, [served.info]), 0).push(0, ModuleSource(model))
    assert served.greedy() == expected(model)


def test_the_socket_is_its_users_alone_and_goes_with_the_engine(served: Served, tmp_path: Path) -> None:
    assert served.server.path.parent.stat().st_mode & 0o077 == 0
    with pytest.raises(TransportError, match="no engine answers at"):
        SocketReceiver(tmp_path / "none.sock", torch.device("cpu"))


def test_tensors_of_every_dtype_and_shape_lie_in_shared_memory() -> None:
    tensors = [
        ("scalar", torch.tensor(3.5, dtype=torch.float64)),
        ("bfloat16", torch.arange(6).to(torch.bfloat16).view(2, 3).t()),
        ("empty", torch.zeros(0, 4)),
        ("bool", torch.tensor([True, False, True])),
    ]
    places, num_bytes = place_tensors(tensors)
    assert [place[3] for place in places] == [0, 256, 512, 512] and num_bytes == 768
    memory = SharedMemory.allocate(num_bytes, torch.device("cpu"))
    message, descriptors = memory.handle()
    there = SharedMemory.open(json.loads(json.dumps(message)), descriptors)
    for place, (_, tensor) in zip(places, tensors, strict=True):
        memory.view(place).copy_(tensor)
        assert torch.equal(there.view(place), tensor) and there.view(place).dtype == tensor.dtype
    with pytest.raises(TransportError, match=r"tensor 'x' lies at 512 \+ 400 of 768 shared bytes"):
        there.view(("x", (100,), "float32", 512))


def test_an_engine_that_shares_no_device_is_refused_and_several_are_spread() -> None:
    ranks = tuple(RankInfo(r, node=f"n{r // 2}", device=f"GPU-{r}", data=r) for r in range(4))
    infos = [EngineInfo(i, f"unix://n{r // 2}/{i}", (f"GPU-{r}",)) for i, r in enumerate((3, 0))]
    address = IpcTransport(1).open(World(ranks), infos)
    assert address.details["senders"] == {"0": [3], "1": [0]}
    with pytest.raises(TransportError, match=r"engine 0 on n1 \(GPU-0\) shares no device with a trainer rank"):
        IpcTransport(1).open(World(ranks), [EngineInfo(0, "unix://n1/a", ("GPU-0",))])
    on_cpus = World(tuple(RankInfo(r, node="here", data=r) for r in range(2)))
    engines = [EngineInfo(i, f"unix://here/{i}") for i in range(3)]
    assert IpcTransport(1).open(on_cpus, engines).details["senders"] == {"0": [0], "1": [1], "2": [0]}
