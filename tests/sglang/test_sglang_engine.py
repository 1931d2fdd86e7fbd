"""The engine over HTTP with a real SGLang server on the CPU: generation, control, weights."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from milepost.errors import MilepostError, TransportError
from milepost.rollout.engine import SamplingParams
from milepost.samples import Sample, Status
from milepost.weights.sglang import HttpReceiver
from milepost.weights.transport import EngineInfo, Manifest, RankInfo, World, digest
from mooncake_here import has_mooncake
from sglang_helpers import MAX_POSITIONS, Served, Tensors, hf_model, log_probs_of, task, weights_of

pytestmark = pytest.mark.takes(35)
PROMPT = [5, 6, 7, 8, 9]
VERSIONS = iter(range(10**6))


@pytest.fixture(scope="module")
def model(served: Served) -> Any:
    return hf_model(served.model_path)


def send(served: Served, weights: Tensors, verify: bool = True) -> int:
    """Push weights as the next version, in three buckets; tell the engine."""
    version = next(VERSIONS)
    specs = weights.specs()
    if verify:
        specs = [replace(spec, digest=digest(tensor)) for spec, (_, tensor) in zip(specs, weights.named, strict=True)]
    served.engine.fence()
    receiver = HttpReceiver(served.engine.endpoint, torch.device("cpu"))
    receiver.prepare(Manifest(version, tuple(specs)))
    third = -(-len(weights.named) // 3)
    for start in range(0, len(weights.named), third):
        receiver.receive(weights.named[start : start + third])
    receiver.commit(version)
    served.engine.committed(version)
    return version


@pytest.fixture
def ready(served: Served, model: Any) -> Served:
    """The engine with the checkpoint's weights, and nothing left of the test before."""
    served.run(served.engine.abort())
    send(served, weights_of(model))
    return served


def ask(served: Served, count: int = 1, tokens: list[int] = PROMPT, **params: Any) -> list[Sample]:
    async def all_of() -> list[Sample]:
        given = SamplingParams(**{"max_new_tokens": 12, **params})
        work = [served.engine.generate(task(i, tokens), tokens, given, (0, i)) for i in range(count)]
        return list(await asyncio.gather(*work))

    samples: list[Sample] = served.run(all_of())
    return samples


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 1.6, "top_p": 0.8},
        {"temperature": 1.3, "top_k": 3},
        {"temperature": 0.9, "min_p": 0.2},
    ],
    ids=str,
)
def test_log_probs_are_of_the_whole_distribution_at_the_temperature(
    ready: Served, model: Any, params: dict[str, float]
) -> None:
    samples = ask(ready, 16, **params)
    assert max(sample.num_trainable for sample in samples) > 3
    for sample in samples:
        expected = log_probs_of(model, sample.tokens.tolist(), params["temperature"])
        where = torch.tensor(sample.trainable)
        np.testing.assert_allclose(sample.log_probs[sample.trainable], expected[where], rtol=0, atol=2e-5)
        assert np.isnan(sample.log_probs[~sample.trainable]).all()
        assert sample.tokens[: len(PROMPT)].tolist() == PROMPT
        assert sample.trainable.tolist() == [False] * len(PROMPT) + [True] * sample.num_trainable
        assert sample.text == ready.tokenizer.decode(sample.tokens[len(PROMPT) :].tolist())


def test_greedy_takes_the_likeliest_token_also_beside_sampled_requests(ready: Served, model: Any) -> None:
    async def mixed() -> list[Sample]:
        greedy, free = SamplingParams(8, temperature=0.0), SamplingParams(8, temperature=2.0)
        work = [ready.engine.generate(task(), PROMPT, p, (i,)) for i, p in enumerate([greedy, free, greedy, free])]
        return list(await asyncio.gather(*work))

    first, _, second, _ = ready.run(mixed())
    assert first.tokens.tolist() == second.tokens.tolist()
    tokens = first.tokens.tolist()
    with torch.no_grad():
        likeliest = model(torch.tensor([tokens])).logits[0].argmax(-1)
    assert tokens[len(PROMPT) :] == likeliest[len(PROMPT) - 1 : -1].tolist()
    expected = log_probs_of(model, tokens, 1.0)[len(PROMPT) :]
    np.testing.assert_allclose(first.log_probs[len(PROMPT) :], expected, rtol=0, atol=2e-5)


def test_the_end_token_and_stop_tokens_are_kept_and_end_a_sample(ready: Served) -> None:
    ends = set(ready.tokenizer.end_token_ids)
    samples = ask(ready, 32, max_new_tokens=40)
    completed = [sample for sample in samples if sample.status is Status.COMPLETED]
    assert completed
    for sample in completed:
        assert int(sample.tokens[-1]) in ends
        assert sample.trainable[-1]
        assert not ends & set(sample.tokens[len(PROMPT) : -1].tolist())
    digits = {token for token in range(ready.tokenizer.vocab_size) if ready.tokenizer.decode([token]).isdigit()}
    for sample in ask(ready, 16, max_new_tokens=40, stop_token_ids=tuple(sorted(digits))):
        assert int(sample.tokens[-1]) in digits | ends
        assert not (digits | ends) & set(sample.tokens[len(PROMPT) : -1].tolist())


def test_stop_texts_end_a_sample_and_stay_in_it(ready: Served) -> None:
    samples = ask(ready, 16, max_new_tokens=40, stop=("7", "3"))
    stopped = [sample for sample in samples if sample.text.endswith(("7", "3"))]
    assert stopped
    for sample in samples:
        assert not any(text in sample.text[:-1] for text in ("7", "3"))
    assert {sample.status for sample in stopped} == {Status.COMPLETED}
    assert {sample.num_trainable == len(sample.log_probs[sample.trainable]) for sample in stopped} == {True}


def test_length_limits_are_the_requests_and_the_contexts(ready: Served) -> None:
    ends = ready.tokenizer.end_token_ids
    limited = ask(ready, 32, max_new_tokens=1)
    assert {sample.num_trainable for sample in limited} == {1}
    for sample in limited:  # an end token that just fits completes the response
        assert sample.status is (Status.COMPLETED if sample.tokens[-1] in ends else Status.TRUNCATED)
    assert {sample.status for sample in limited} == {Status.COMPLETED, Status.TRUNCATED}
    stopped = ask(ready, 32, max_new_tokens=1, stop=("7", "3"))
    assert all((sample.status is Status.COMPLETED) for sample in stopped if sample.text in {"7", "3"})
    prompt = [5 + i % 10 for i in range(MAX_POSITIONS - 2)]
    samples = ask(ready, 8, tokens=prompt, max_new_tokens=40, temperature=3.0)
    assert max(len(sample) for sample in samples) == MAX_POSITIONS
    assert ask(ready, tokens=[*prompt, 5])[0].num_trainable == 1


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        ([], {}, "a prompt has 0 tokens, expected 1 to 59"),
        ([5] * MAX_POSITIONS, {}, "a prompt has 60 tokens, expected 1 to 59"),
        ([5, 10**6], {}, "prompt has a token outside 0 to"),
        ([5], {"stop_token_ids": (10**6,)}, "stop_token_ids has a token outside 0 to"),
        ([5], {"top_p": 0.0}, "sampling parameter top_p is 0.0"),
    ],
)
def test_requests_that_can_never_be_served_are_refused_before_they_reach_the_server(
    ready: Served, tokens: list[int], params: dict[str, Any], message: str
) -> None:
    with pytest.raises(MilepostError, match=message):
        ask(ready, tokens=tokens, **params)
    assert ask(ready)[0].num_trainable > 0


def test_many_requests_at_once_share_the_server(ready: Served) -> None:
    samples = ask(ready, 100, max_new_tokens=6)
    assert len(samples) == 100
    assert [sample.task.index for sample in samples] == list(range(100))
    assert ready.engine.num_pending == 0


async def begin(served: Served, count: int) -> list[asyncio.Task[Sample]]:
    """Start requests that run long, and wait until they do."""
    params = SamplingParams(50, temperature=1.0)
    prompt = [5, 6]
    work = [asyncio.ensure_future(served.engine.generate(task(i, prompt), prompt, params, (i,))) for i in range(count)]
    await asyncio.sleep(0.05)
    return work


def test_abort_ends_requests_with_what_they_have(ready: Served) -> None:
    async def aborted() -> list[Sample]:
        work = await begin(ready, 32)
        await ready.engine.abort()
        return list(await asyncio.gather(*work))

    samples = ready.run(aborted())
    assert ready.engine.num_pending == 0
    assert Status.ABORTED in {sample.status for sample in samples}
    for sample in samples:
        assert sample.num_trainable == np.isfinite(sample.log_probs).sum()
    assert ask(ready)[0].status is not Status.ABORTED


def test_pause_keeps_requests_and_resume_finishes_them(ready: Served, model: Any) -> None:
    async def paused() -> tuple[list[Sample], int]:
        work = await begin(ready, 32)
        await ready.engine.pause()
        await asyncio.sleep(0.5)
        done = sum(one.done() for one in work)
        late = asyncio.ensure_future(ready.engine.generate(task(), PROMPT, SamplingParams(4), (9,)))
        await asyncio.sleep(0.5)
        assert sum(one.done() for one in work) == done
        assert not late.done()
        await ready.engine.resume()
        return [*await asyncio.gather(*work), await late], done

    samples, done = ready.run(paused())
    assert done < 32
    assert Status.ABORTED not in {sample.status for sample in samples}
    for sample in samples:  # their cache was dropped and computed again
        expected = log_probs_of(model, sample.tokens.tolist(), 1.0)[torch.tensor(sample.trainable)]
        np.testing.assert_allclose(sample.log_probs[sample.trainable], expected, rtol=0, atol=2e-5)


def test_abort_while_paused_ends_what_runs_and_what_waits(ready: Served) -> None:
    async def both() -> list[Sample]:
        work = await begin(ready, 8)
        await ready.engine.pause()
        work.append(asyncio.ensure_future(ready.engine.generate(task(), PROMPT, SamplingParams(4), (9,))))
        await asyncio.sleep(0.05)
        await ready.engine.abort()
        samples = list(await asyncio.gather(*work))
        await ready.engine.resume()
        return samples

    samples = ready.run(both())
    assert samples[-1].status is Status.ABORTED
    assert samples[-1].num_trainable == 0
    assert ask(ready)[0].num_trainable > 0


def test_a_cancelled_request_leaves_the_server(ready: Served) -> None:
    async def cancelled() -> None:
        work = await begin(ready, 32)
        for one in work:
            one.cancel()
        await asyncio.gather(*work, return_exceptions=True)
        assert ready.engine.num_pending == 0
        await ready.engine.sleep(("kv_cache",))  # only goes through on an idle server
        await ready.engine.wake(("kv_cache",))

    ready.run(cancelled())


def test_sleep_fences_and_a_push_after_the_wake_serves_again(ready: Served, model: Any) -> None:
    async def sleep() -> None:
        work = await begin(ready, 32)  # some end before they are aborted, never all of them
        with pytest.raises(RuntimeError, match=r"while \d+ requests are pending"):
            await ready.engine.sleep(("weights",))
        with pytest.raises(RuntimeError, match=r"a weight push while \d+ requests are pending"):
            ready.engine.fence()
        await ready.engine.abort()
        await asyncio.gather(*work)
        await ready.engine.sleep(("weights", "kv_cache", "graphs"))
        assert ready.engine.asleep == {"weights", "kv_cache", "graphs"}
        assert await ready.engine.healthy()
        with pytest.raises(RuntimeError, match="graphs and kv_cache and weights asleep"):
            await ready.engine.generate(task(), PROMPT, SamplingParams(4), (0,))
        with pytest.raises(RuntimeError, match="weights are asleep"):
            ready.engine.fence()
        await ready.engine.wake(("weights",))
        with pytest.raises(RuntimeError, match="graphs and kv_cache asleep"):
            await ready.engine.generate(task(), PROMPT, SamplingParams(4), (0,))

    ready.run(sleep())
    version = send(ready, weights_of(model))
    ready.run(ready.engine.wake(("kv_cache", "graphs")))
    ready.run(ready.engine.wake(("kv_cache",)))  # awake already
    [sample] = ask(ready)
    assert sample.versions[sample.trainable].tolist() == [version] * sample.num_trainable
    assert sample.versions[~sample.trainable].tolist() == [-1] * len(PROMPT)


# Weights


@pytest.mark.parametrize("verify", [True, False])
def test_pushed_weights_are_what_generates(ready: Served, model: Any, verify: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    moved = hf_model(ready.model_path)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    version = send(ready, weights_of(moved), verify)
    for sample in ask(ready, 8):
        expected = log_probs_of(moved, sample.tokens.tolist(), 1.0)[torch.tensor(sample.trainable)]
        np.testing.assert_allclose(sample.log_probs[sample.trainable], expected, rtol=0, atol=2e-5)
        stale = log_probs_of(model, sample.tokens.tolist(), 1.0)[torch.tensor(sample.trainable)]
        assert np.abs(sample.log_probs[sample.trainable] - stale.numpy()).max() > 1e-3
        assert sample.versions.max() == version


def refuse(served: Served, weights: Tensors, message: str, **manifest: Any) -> None:
    """A push that must be refused, leave the server up and fenced, and be repaired by a whole one."""
    specs = [replace(spec, **manifest.get(spec.name, {})) for spec in weights.specs()]
    receiver = HttpReceiver(served.engine.endpoint, torch.device("cpu"))
    served.engine.fence()
    with pytest.raises(TransportError, match=message):
        receiver.prepare(Manifest(77, tuple(specs)))
        receiver.receive(weights.named)
        receiver.commit(77)
    # the push is over, also for whoever goes on as if nothing had happened
    with pytest.raises(TransportError, match="prepare again"):
        receiver.receive(weights.named[:1])
    with pytest.raises(TransportError, match="commit of version 77, but none is under way"):
        receiver.commit(77)
    with pytest.raises(RuntimeError, match="fenced; push weights first"):
        ask(served)
    with urllib.request.urlopen(served.engine.endpoint + "/model_info") as answer:
        assert json.load(answer)["weight_version"] == "fenced"


def test_a_push_of_other_tensors_is_refused_by_name(ready: Served, model: Any) -> None:
    whole = weights_of(model).named
    name, tensor = whole[3]
    wrong = tensor[:, :-1] if tensor.ndim > 1 else tensor[:-1]
    refuse(ready, Tensors([*whole[:3], (name, wrong.contiguous()), *whole[4:]]), rf"cannot take tensor '{name}'")
    refuse(ready, Tensors([*whole, ("model.layers.9.nothing.weight", tensor)]), "no place for tensor 'model.layers.9")
    refuse(ready, Tensors(whole), f"tensor '{name}' arrived with other bytes", **{name: {"digest": "0" * 64}})
    refuse(
        ready,
        Tensors(whole),
        rf"tensor '{name}' is float32.*the manifest says bfloat16",
        **{name: {"dtype": "bfloat16"}},
    )
    send(ready, weights_of(model))
    assert ask(ready)[0].num_trainable > 0


def test_a_push_that_lacks_a_tensor_is_not_committed(ready: Served, model: Any) -> None:
    whole = weights_of(model)
    receiver = HttpReceiver(ready.engine.endpoint, torch.device("cpu"))
    ready.engine.fence()
    receiver.prepare(Manifest(78, tuple(whole.specs())))
    receiver.receive(whole.named[:-1])
    with pytest.raises(TransportError, match=rf"incomplete: 1 tensors missing \({whole.named[-1][0]}\)"):
        receiver.commit(78)
    half = Tensors(whole.named[:-1])
    with pytest.raises(TransportError, match="no tensor of the push went into the engine's parameter"):
        send(ready, half)


def test_verification_reads_what_stands_in_the_engine(ready: Served, model: Any) -> None:
    # The second tensor goes where the first went: its bytes arrived, and are not there at the commit.
    whole = weights_of(model)
    name, tensor = next((n, t) for n, t in whole.named if n.endswith("layers.0.mlp.gate_proj.weight"))
    receiver = HttpReceiver(ready.engine.endpoint, torch.device("cpu"))
    specs = [replace(spec, digest=digest(t)) for spec, (_, t) in zip(whole.specs(), whole.named, strict=True)]
    receiver.prepare(Manifest(79, tuple(specs)))
    receiver.receive(whole.named)
    # Somebody writes into the engine behind the receiver's back.
    body = {"serialized_named_tensors": behind_its_back(name, tensor + 1), "flush_cache": False}
    request = urllib.request.Request(
        ready.engine.endpoint + "/update_weights_from_tensor",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["success"]
    with pytest.raises(TransportError, match=rf"tensor '{name}' differs in the engine from what was sent"):
        receiver.commit(79)


def behind_its_back(name: str, tensor: torch.Tensor) -> list[str]:
    from milepost.weights.sglang import _serialize

    return [_serialize(name, tensor)]


def test_the_ipc_transport_reaches_a_server(ready: Served, model: Any) -> None:
    import milepost

    transport = milepost.resolve("transport", "ipc", {"bucket_mb": 1})
    world = World((RankInfo(0),))
    address = transport.open(world, [EngineInfo(0, ready.engine.endpoint)])
    weights = weights_of(model)
    report = transport.sender(replace(address, verify=True), rank=0).push(next(VERSIONS), weights)
    assert report.num_bytes == sum(4 * tensor.numel() for _, tensor in weights.named)
    assert report.engines == (0,)
    assert transport.receiver(address, 0) is None
    gpus = World((RankInfo(0, device="GPU-1"),))
    with pytest.raises(TransportError, match="shares no device with a trainer rank"):
        transport.open(gpus, [EngineInfo(0, ready.engine.endpoint, ("GPU-2",))])


def test_megatron_core_stays_out_of_a_server(served: Served) -> None:
    """It would take the memory saver's mode away from CUDA graphs; it says so when it is imported."""
    assert "Megatron" not in served.server.log_path.read_text()


@pytest.mark.parametrize("name", ["broadcast", "p2p"])
def test_a_server_is_pushed_to_over_a_network(ready: Served, name: str) -> None:
    import milepost

    moved = hf_model(ready.model_path)
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1.05)
    transport = milepost.resolve("transport", name, {"bucket_mb": 1, "timeout": 100})
    address = transport.open(World((RankInfo(0),)), [EngineInfo(0, ready.engine.endpoint)])
    address = replace(address, verify=True, details={**address.details, "bucket_bytes": 40000})
    sender = transport.sender(address, rank=0)
    weights = weights_of(moved)
    if name == "p2p" and not has_mooncake():
        with pytest.raises(TransportError, match="apt-get install libibverbs1"):
            sender.push(next(VERSIONS), weights)
        return
    for _ in range(2):  # the second through the group of the first
        version = next(VERSIONS)
        ready.engine.fence()
        report = sender.push(version, weights)
        assert report.num_bytes == sum(4 * tensor.numel() for _, tensor in weights.named)
        ready.engine.committed(version)
    [sample] = ask(ready)
    expected = log_probs_of(moved, sample.tokens.tolist(), 1.0)[torch.tensor(sample.trainable)]
    np.testing.assert_allclose(sample.log_probs[sample.trainable], expected, rtol=0, atol=2e-5)
    # A refusal leaves the server up and fenced, and the next push makes it good.
    _, tensor = weights.named[-1]
    ready.engine.fence()
    with pytest.raises(TransportError, match="no place for tensor 'nowhere'"):
        sender.push(next(VERSIONS), Tensors([*weights.named, ("nowhere", tensor)]))
    with urllib.request.urlopen(ready.engine.endpoint + "/model_info") as answer:
        assert json.load(answer)["weight_version"] == "fenced"
    assert sender.push(next(VERSIONS), weights).engines == (0,)
