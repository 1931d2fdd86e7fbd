"""The `ipc` transport within one process, from a transformers model to a local engine."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import milepost
import pytest
import torch
from milepost.errors import TransportError
from milepost.rollout.engine import SamplingParams
from milepost.rollout.local import LocalEngine
from milepost.rollout.local.decoder import LeanDecoder
from milepost.samples import Task
from milepost.weights.transport import EngineInfo, RankInfo, Shard, TensorSpec, World
from milepost_ipc.transport import IpcTransport
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

WORLD = World((RankInfo(0),))


class Source:
    """A transformers model as a weight source."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.fail_after: int | None = None
        self.reads = 0

    def specs(self) -> Sequence[TensorSpec]:
        return [
            TensorSpec(name, tuple(value.shape), str(value.dtype).removeprefix("torch."))
            for name, value in self.model.named_parameters()
        ]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        self.reads += 1
        for index, (name, value) in enumerate(self.model.named_parameters()):
            if index == self.fail_after:
                raise OSError("the sender died")
            yield name, value.detach()

    def shards(self) -> Iterator[Shard]:
        raise NotImplementedError


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen3Config(
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
    return Qwen3ForCausalLM(config)


def make_engine(model: Any, name: str) -> LocalEngine:
    decoder = LeanDecoder(model.config.to_dict(), torch.float32, torch.device("cpu"))
    return LocalEngine(decoder=decoder, decode=str, end_token_ids=(), max_positions=32, name=name)


async def greedy(engine: LocalEngine) -> list[int]:
    sample = await engine.generate(
        Task(index=0, prompt="", tokens=(3, 4)), (3, 4), SamplingParams(8, temperature=0.0), (0,)
    )
    return list(sample.tokens.tolist())


def expected(model: Any) -> list[int]:
    return list(
        model.generate(torch.tensor([[3, 4]]), do_sample=False, max_new_tokens=8, eos_token_id=None)[0].tolist()
    )


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 2**20])
def test_a_push_reaches_the_engines_it_names(verify: bool, bucket_bytes: int) -> None:
    models = [make_model(seed) for seed in range(2)]
    engines = [make_engine(models[0], name) for name in ("a", "b")]
    infos = [EngineInfo(index, engine.endpoint) for index, engine in enumerate(engines)]
    size = sum(parameter.numel() * 4 for parameter in models[0].parameters())

    async def act() -> None:
        for engine in engines:
            await engine.start()
        transport = IpcTransport(bucket_bytes)
        address = replace(transport.open(WORLD, infos), verify=verify)
        assert pickle.loads(pickle.dumps(address)) == address
        sender = transport.sender(address, 0)
        source = Source(models[0])
        report = sender.push(0, source)
        assert (report.version, report.num_bytes, report.engines) == (0, 2 * size, (0, 1))
        assert report.seconds > 0 and source.reads == 1 + verify
        assert [await greedy(engine) for engine in engines] == [expected(models[0])] * 2

        report = sender.push(1, Source(models[1]), engines=[1])
        assert (report.num_bytes, report.engines) == (size, (1,))
        assert [engine.version for engine in engines] == [0, 1]
        assert await greedy(engines[0]) == expected(models[0])
        assert await greedy(engines[1]) == expected(models[1])
        for engine in engines:
            await engine.stop()

    asyncio.run(act())


def test_a_dead_sender_leaves_the_engine_fenced_until_a_whole_push() -> None:
    model = make_model(0)
    engine = make_engine(model, "a")

    async def act() -> None:
        await engine.start()
        transport = IpcTransport(1)
        sender = transport.sender(transport.open(WORLD, [EngineInfo(0, engine.endpoint)]), 0)
        sender.push(0, Source(model))
        source = Source(model)
        source.fail_after = 5
        with pytest.raises(OSError, match="the sender died"):
            sender.push(1, source)
        assert engine.version == 0
        with pytest.raises(RuntimeError, match="fenced"):
            await greedy(engine)
        sender.push(2, Source(model))
        assert engine.version == 2 and await greedy(engine) == expected(model)
        await engine.stop()

    asyncio.run(act())


def test_the_receiver_side_and_ranks_that_send_nothing() -> None:
    model = make_model(0)
    engine = make_engine(model, "a")

    async def act() -> None:
        await engine.start()
        transport = IpcTransport(2**20)
        world = World((RankInfo(0), RankInfo(1, data=1)))
        address = transport.open(world, [EngineInfo(7, engine.endpoint)])
        source = Source(model)
        report = transport.sender(address, 1).push(0, source)
        assert (report.num_bytes, source.reads, engine.version) == (0, 1, -1)  # it took part in gathering
        assert transport.receiver(address, 7) is not None
        with pytest.raises(TransportError, match=r"no engine 3; the transport was opened with \[7\]"):
            transport.receiver(address, 3)
        with pytest.raises(TransportError, match="no engine 3"):
            transport.sender(address, 0).push(0, source, engines=[3])
        await engine.stop()
        with pytest.raises(TransportError, match="no engine at 'local:a'"):
            transport.sender(address, 0).push(0, source)

    asyncio.run(act())


def test_a_rank_reads_its_source_to_the_end_though_an_engine_fails_and_others_are_not_committed() -> None:
    models = [make_model(0), make_model(1)]
    engines = [make_engine(models[0], name) for name in ("a", "b")]

    async def act() -> None:
        for engine in engines:
            await engine.start()
        transport = IpcTransport(1)  # one tensor at a time
        sender = transport.sender(transport.open(WORLD, [EngineInfo(i, e.endpoint) for i, e in enumerate(engines)]), 0)
        sender.push(0, Source(models[0]))
        source = Source(models[1])
        yielded = []

        class Watched:
            def specs(self) -> Any:
                return source.specs()

            def tensors(self) -> Any:
                for name, tensor in source.tensors():
                    yielded.append(name)
                    # the third is not what the manifest says: both engines refuse it
                    yield name, tensor[:1] if len(yielded) == 3 else tensor

        with pytest.raises(TransportError):
            sender.push(1, Watched())  # type: ignore[arg-type]
        assert yielded == [spec.name for spec in source.specs()]  # other ranks gathered with this one
        await engines[0].stop()
        with pytest.raises(TransportError, match="no engine at 'local:a'"):
            sender.push(2, Source(models[1]))
        assert engines[1].version == 0
        with pytest.raises(RuntimeError, match="fenced"):
            await greedy(engines[1])
        assert sender.push(3, Source(models[1]), engines=[1]).engines == (1,)
        assert await greedy(engines[1]) == expected(models[1])
        await engines[1].stop()

    asyncio.run(act())


def test_engines_elsewhere_are_refused() -> None:
    transport = milepost.resolve("transport", "ipc", {"bucket_mb": 1})
    with pytest.raises(TransportError, match=r"engine 0 is at 'tcp://localhost:1'"):
        transport.open(WORLD, [EngineInfo(0, "tcp://localhost:1")])
    with pytest.raises(TransportError, match="share an index"):
        transport.open(WORLD, [EngineInfo(0, "local:a"), EngineInfo(0, "local:b")])
