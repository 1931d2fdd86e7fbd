"""The local engine: what it samples, what it says about it, and how it behaves around weights, pauses and failures."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from local_helpers import (
    END,
    GENERIC,
    LEAN,
    VOCAB,
    ask,
    decode,
    make_decoder,
    make_engine,
    make_model,
    push,
    reference_log_probs,
    run,
)
from milepost.errors import MilepostError, RunError
from milepost.rollout.engine import SamplingParams
from milepost.rollout.local.decoder import LeanDecoder
from milepost.rollout.local.hf_decoder import HFDecoder
from milepost.rollout.local.rows import UniformStreams, stream_key
from milepost.samples import Sample, Status, Task

QWEN3 = LEAN["qwen3-tied"]
PROMPTS = [[5], [7, 3, 8, 20, 31, 40, 6], [9, 9, 12, 14, 15, 16, 17, 18, 19, 21, 22, 23], [4, 30, 50]]


def check_log_probs(model: Any, sample: Sample, temperature: float) -> None:
    expected = reference_log_probs(model, sample, temperature).numpy()
    where = sample.trainable[1:]
    np.testing.assert_allclose(sample.log_probs[1:][where], expected[where], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        pytest.param(LeanDecoder, LEAN["qwen3-tied"], id="qwen3-tied"),
        pytest.param(LeanDecoder, LEAN["qwen3-untied-bias"], id="qwen3-untied"),
        pytest.param(LeanDecoder, LEAN["llama3-biases"], id="llama"),
        pytest.param(HFDecoder, GENERIC["gpt2"], id="generic-gpt2"),
        pytest.param(HFDecoder, GENERIC["gemma2-mixed-softcap"], id="generic-gemma2"),
    ],
)
def test_log_probs_equal_a_full_forward(kind: Any, config: dict[str, Any]) -> None:
    model = make_model(config)
    engine = make_engine(
        model, kind(model.config.to_dict(), torch.float32, torch.device("cpu")), max_running_requests=7
    )
    settings = [SamplingParams(20), SamplingParams(9, temperature=0.6), SamplingParams(30, temperature=1.7, top_k=5)]

    async def act() -> list[Sample]:
        return await asyncio.gather(
            *[
                ask(engine, prompt, params, (i, j))
                for i, prompt in enumerate(PROMPTS)
                for j, params in enumerate(settings)
            ]
        )

    samples = run(engine, model, act)
    assert len(samples) == 12
    for index, sample in enumerate(samples):
        prompt, params = PROMPTS[index // 3], settings[index % 3]
        count = len(prompt)
        assert sample.tokens.dtype == np.int32 and sample.log_probs.dtype == np.float32
        assert sample.tokens[:count].tolist() == prompt
        assert sample.trainable.tolist() == [False] * count + [True] * (len(sample) - count)
        assert np.isnan(sample.log_probs[:count]).all()
        assert sample.versions.tolist() == [-1] * count + [0] * (len(sample) - count)
        assert sample.text == decode(sample.tokens[count:].tolist())
        ended = sample.tokens[-1] == END
        assert sample.status == (Status.COMPLETED if ended else Status.TRUNCATED)
        assert len(sample) - count == params.max_new_tokens or ended
        assert END not in sample.tokens[count:-1]
        check_log_probs(model, sample, params.temperature)


@pytest.mark.parametrize("name", ["qwen3-tied", "llama"])
def test_greedy_equals_transformers_generate(name: str) -> None:
    model = make_model(LEAN[name])
    engine = make_engine(model)

    async def act() -> list[Sample]:
        return await asyncio.gather(*[ask(engine, prompt, SamplingParams(24, temperature=0.0)) for prompt in PROMPTS])

    for prompt, sample in zip(PROMPTS, run(engine, model, act), strict=True):
        expected = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0].tolist()
        assert sample.tokens.tolist() == expected
        check_log_probs(model, sample, 1.0)


def test_a_continuation_does_not_depend_on_its_neighbours() -> None:
    model = make_model(QWEN3)
    params = SamplingParams(40)

    def generate(requests: list[tuple[int, int]], rows: int = 64) -> dict[tuple[int, int], list[int]]:
        engine = make_engine(model, max_running_requests=rows)

        async def act() -> list[Sample]:
            return await asyncio.gather(*[ask(engine, PROMPTS[i], params, (i, j)) for i, j in requests])

        return dict(zip(requests, [sample.tokens.tolist() for sample in run(engine, model, act)], strict=True))

    requests = [(i, j) for i in range(4) for j in range(6)]
    together = generate(requests)
    assert len({tuple(tokens) for tokens in together.values()}) == len(requests)
    assert generate(requests[::-1]) == together
    assert generate(requests, rows=5) == together  # rows join and leave in mid-flight
    for request in requests[::5]:
        assert generate([request])[request] == together[request]


def test_equal_calls_give_equal_bits() -> None:
    model = make_model(QWEN3)

    def once() -> list[bytes]:
        engine = make_engine(model, max_running_requests=5)

        async def act() -> list[Sample]:
            return await asyncio.gather(
                *[ask(engine, prompt, SamplingParams(30), (i, j)) for i, prompt in enumerate(PROMPTS) for j in range(4)]
            )

        return [sample.tokens.tobytes() + sample.log_probs.tobytes() for sample in run(engine, model, act)]

    assert once() == once()


def test_samples_of_a_prompt_share_one_prefill() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model)

    async def act() -> list[Sample]:
        return await asyncio.gather(*[ask(engine, PROMPTS[i % 2], SamplingParams(5), (i,)) for i in range(12)])

    run(engine, model, act)
    counters = engine.counters
    assert (counters.prompts, counters.prefills, counters.prefill_tokens) == (12, 2, len(PROMPTS[0]) + len(PROMPTS[1]))


def test_prefills_are_cut_to_the_token_budget_and_give_the_same() -> None:
    model = make_model(QWEN3)

    def generate(budget: int) -> list[list[int]]:
        engine = make_engine(model, prefill_tokens=budget)

        async def act() -> list[Sample]:
            return await asyncio.gather(*[ask(engine, p, SamplingParams(8), (i,)) for i, p in enumerate(PROMPTS)])

        return [sample.tokens.tolist() for sample in run(engine, model, act)]

    assert generate(1) == generate(13) == generate(8192)


def test_finished_rows_leave_and_resolve_while_others_run() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, end_token_ids=())
    finished: list[int] = []

    async def one(length: int) -> None:
        await ask(engine, PROMPTS[1], SamplingParams(length), (length,))
        finished.append(length)
        if length == 2:
            assert engine.num_pending == 3

    async def act() -> None:
        await asyncio.gather(*[one(length) for length in (40, 2, 11, 23)])

    run(engine, model, act)
    assert finished == [2, 11, 23, 40]
    # The first tokens come from the prefill: 39 steps, and each row is in as many as it needs.
    assert (engine.counters.steps, engine.counters.step_rows) == (39, 39 + 1 + 10 + 22)


def test_limits_by_context_and_requests_that_can_never_be_served() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, max_positions=16, end_token_ids=(), max_cache_tokens=40)

    async def act() -> Sample:
        sample: Sample = await ask(engine, [5] * 10, SamplingParams(50))
        with pytest.raises(MilepostError, match="16 tokens, expected 1 to 15"):
            await ask(engine, [5] * 16, SamplingParams(1))
        with pytest.raises(MilepostError, match="0 tokens"):
            await ask(engine, [], SamplingParams(1))
        with pytest.raises(MilepostError, match="outside 0 to 60"):
            await ask(engine, [5, VOCAB], SamplingParams(1))
        with pytest.raises(MilepostError, match="stop_token_ids has a token outside"):
            await ask(engine, [5], SamplingParams(1, stop_token_ids=(99,)))
        assert engine.num_pending == 0
        return sample

    sample = run(engine, model, act)
    assert (len(sample), sample.status) == (16, Status.TRUNCATED)
    check_log_probs(model, sample, 1.0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(0), "max_new_tokens is 0"),
        (SamplingParams(1, temperature=-1.0), "temperature is -1.0"),
        (SamplingParams(1, top_p=0.0), "top_p is 0.0"),
        (SamplingParams(1, top_k=-1), "top_k is -1"),
        (SamplingParams(1, min_p=2.0), "min_p is 2.0"),
        (SamplingParams(1, stop=("",)), "stop is"),
    ],
)
def test_senseless_parameters_are_refused(params: SamplingParams, message: str) -> None:
    model = make_model(QWEN3)
    engine = make_engine(model)

    async def act() -> None:
        with pytest.raises(MilepostError, match=message):
            await ask(engine, [5], params)

    run(engine, model, act)


def test_a_cache_budget_queues_what_does_not_fit() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, end_token_ids=(), max_cache_tokens=2 * 20)

    async def act() -> list[Sample]:
        return await asyncio.gather(*[ask(engine, [5] * 10, SamplingParams(10), (i,)) for i in range(5)])

    samples = run(engine, model, act)
    assert [len(sample) for sample in samples] == [20] * 5
    assert (engine.counters.steps, engine.counters.step_rows) == (27, 45)  # two, two, one


def test_stop_tokens_and_stop_texts_are_kept() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, end_token_ids=())

    async def act() -> tuple[Sample, list[Sample], list[Sample]]:
        free: Sample = await ask(engine, PROMPTS[1], SamplingParams(60))
        response = free.tokens[7:].tolist()
        by_token = [await ask(engine, PROMPTS[1], SamplingParams(60, stop_token_ids=(response[at],))) for at in (0, 11)]
        by_text = [
            await ask(engine, PROMPTS[1], SamplingParams(60, stop=("@@", decode(response[at - 2 : at + 1]))))
            for at in (9, 40)
        ]
        return free, by_token, by_text

    free, by_token, by_text = run(engine, model, act)
    response = free.tokens[7:].tolist()
    for sample, at in zip(by_token, (0, 11), strict=True):
        end = response.index(response[at])
        assert sample.tokens[7:].tolist() == response[: end + 1]
        assert sample.status == Status.COMPLETED
    for sample, at in zip(by_text, (9, 40), strict=True):
        stop = decode(response[at - 2 : at + 1])
        assert sample.text.endswith(stop) and stop not in sample.text[:-1]
        assert sample.tokens[7:].tolist() == response[: len(sample) - 7]
        assert sample.status == Status.COMPLETED


def test_pause_keeps_requests_and_resume_goes_on() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, end_token_ids=())
    params = SamplingParams(90, temperature=0.9)

    async def act() -> tuple[list[Sample], list[Sample]]:
        whole = await asyncio.gather(*[ask(engine, PROMPTS[i], params, (i,)) for i in range(4)])
        calls = [asyncio.create_task(ask(engine, PROMPTS[i], params, (i,))) for i in range(4)]
        begun = engine.counters.steps
        while engine.counters.steps < begun + 66:  # beyond one block of random numbers
            await asyncio.sleep(0)
        await engine.pause()
        steps = engine.counters.steps
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.counters.steps <= steps + 1 and engine.num_pending == 4
        # Memory and weights go and come back; the same weights under another version number.
        await engine.sleep(["weights", "kv_cache", "graphs"])
        await engine.wake(["weights"])
        push(engine, model, version=1)
        await engine.wake(["kv_cache", "graphs"])
        await engine.resume()
        return whole, list(await asyncio.gather(*calls))

    whole, interrupted = run(engine, model, act)
    for first, second in zip(whole, interrupted, strict=True):
        assert second.tokens.tolist() == first.tokens.tolist()
        np.testing.assert_allclose(second.log_probs, first.log_probs, rtol=0, atol=1e-5)
        sampled = second.versions[second.trainable].tolist()
        assert sampled == sorted(sampled)
        assert sampled.count(0) > 64 and sampled.count(1) > 0


def test_abort_returns_what_there_is() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, end_token_ids=(), max_running_requests=2)

    async def act() -> list[Sample]:
        calls = [asyncio.create_task(ask(engine, PROMPTS[1], SamplingParams(100), (i,))) for i in range(3)]
        for _ in range(6):
            await asyncio.sleep(0)
        await engine.abort()
        samples = list(await asyncio.gather(*calls))
        later: Sample = await ask(engine, PROMPTS[1], SamplingParams(3))
        return [*samples, later]

    *aborted, later = run(engine, model, act)
    assert [sample.status for sample in aborted] == [Status.ABORTED] * 3
    assert 0 < aborted[0].num_trainable < 100 and aborted[0].num_trainable == aborted[1].num_trainable
    assert (aborted[2].num_trainable, aborted[2].text, len(aborted[2])) == (0, "", 7)  # it was still waiting
    check_log_probs(model, aborted[0], 1.0)
    assert (later.num_trainable, later.status) == (3, Status.TRUNCATED)


def test_stop_ends_pending_requests() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, end_token_ids=())

    async def act() -> Sample:
        call = asyncio.create_task(ask(engine, PROMPTS[1], SamplingParams(100)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.stop()
        assert not await engine.healthy()
        with pytest.raises(RuntimeError, match="not started"):
            await ask(engine, [5], SamplingParams(1))
        sample: Sample = await call
        return sample

    assert run(engine, model, act).status == Status.ABORTED


def test_a_caller_that_goes_away_takes_its_row_along() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, end_token_ids=(), max_running_requests=2)

    async def act() -> Sample:
        calls = [asyncio.create_task(ask(engine, PROMPTS[1], SamplingParams(30), (i,))) for i in range(3)]
        for _ in range(3):
            await asyncio.sleep(0)
        calls[0].cancel()
        calls[2].cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert engine.num_pending == 1
        sample: Sample = await calls[1]
        alone: Sample = await ask(engine, PROMPTS[1], SamplingParams(30), (1,))
        assert sample.tokens.tolist() == alone.tokens.tolist()
        return sample

    check_log_probs(model, run(engine, model, act), 1.0)


def test_a_fenced_or_sleeping_engine_refuses() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model)

    async def act() -> None:
        request = SamplingParams(2)
        engine.fence()
        with pytest.raises(RuntimeError, match="fenced"):
            await ask(engine, [5], request)
        with pytest.raises(KeyError, match="misses"):
            engine.serve(3)
        assert engine.version == 0
        push(engine, model, version=3)
        assert (await ask(engine, [5], request)).versions.tolist() == [-1, 3, 3]
        with pytest.raises(RuntimeError, match="serving; fence it first"):
            engine.load([])

        await engine.sleep(["kv_cache"])
        with pytest.raises(RuntimeError, match="kv_cache are asleep"):
            await ask(engine, [5], request)
        await engine.wake(["kv_cache"])
        assert (await ask(engine, [5], request)).versions.tolist() == [-1, 3, 3]

        await engine.sleep(["weights"])
        with pytest.raises(RuntimeError, match="asleep; wake"):
            engine.fence()
        await engine.wake(["weights"])
        with pytest.raises(RuntimeError, match="push weights first"):  # what slept is lost
            await ask(engine, [5], request)
        push(engine, model, version=4)
        assert (await ask(engine, [5], request)).versions.tolist() == [-1, 4, 4]

    run(engine, model, act)


def test_weights_and_memory_stay_while_requests_run() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, end_token_ids=())

    async def act() -> None:
        call = asyncio.create_task(ask(engine, [5], SamplingParams(50)))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="1 requests are pending; pause or abort"):
            engine.fence()
        with pytest.raises(RuntimeError, match="pause or abort"):
            await engine.sleep(["kv_cache"])
        assert (await call).num_trainable == 50

    run(engine, model, act)


def test_a_failure_reaches_every_waiting_request() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, max_running_requests=2)

    async def act() -> None:
        with torch.no_grad():
            broken = make_model(QWEN3)
            broken.model.layers[1].mlp.down_proj.weight[0, 0] = torch.nan
        push(engine, broken, version=1)
        results = await asyncio.gather(
            *[ask(engine, [5, i], SamplingParams(20), (i,)) for i in range(5)], return_exceptions=True
        )
        assert all(isinstance(result, RunError) and "not finite" in str(result) for result in results)
        assert not await engine.healthy()
        with pytest.raises(RuntimeError, match="failed earlier"):
            await ask(engine, [5], SamplingParams(1))
        await engine.start()  # once more, with good weights
        push(engine, model, version=2)
        assert (await ask(engine, [5], SamplingParams(2))).num_trainable == 2

    run(engine, model, act)


def test_an_engine_outlives_the_event_loop_of_a_rollout() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model)

    async def first() -> Sample:
        await engine.start()
        push(engine, model)
        sample: Sample = await ask(engine, PROMPTS[0], SamplingParams(10))
        return sample

    async def second() -> Sample:
        sample: Sample = await ask(engine, PROMPTS[0], SamplingParams(10))
        await engine.stop()
        return sample

    assert asyncio.run(first()).tokens.tolist() == asyncio.run(second()).tokens.tolist()


def test_long_runs_reuse_the_tables() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, end_token_ids=(), max_running_requests=3)

    async def act() -> list[Sample]:
        return await asyncio.gather(
            *[ask(engine, PROMPTS[3], SamplingParams(20 + 7 * (i % 11)), (i,)) for i in range(14)]
        )

    samples = run(engine, model, act)
    assert engine.counters.steps > 200  # several times the tables' lines
    for i, sample in enumerate(samples):
        assert sample.num_trainable == 20 + 7 * (i % 11)
        check_log_probs(model, sample, 1.0)


def test_sampling_follows_the_distribution() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, end_token_ids=(), max_running_requests=1000)
    count, temperature = 6000, 1.5

    async def act() -> list[Sample]:
        params = SamplingParams(2, temperature=temperature)
        return await asyncio.gather(*[ask(engine, PROMPTS[3], params, (1, i)) for i in range(count)])

    samples = run(engine, model, act)
    with torch.no_grad():
        first = (model(torch.tensor([PROMPTS[3]])).logits[0, -1] / temperature).double().softmax(-1)
        one_by_one = torch.tensor([[*PROMPTS[3], token] for token in range(VOCAB)])
        second = first @ (model(one_by_one).logits[:, -1] / temperature).double().softmax(-1)
    for at, probs in ((3, first), (4, second)):
        seen = np.bincount([sample.tokens[at] for sample in samples], minlength=VOCAB)
        expected = probs.numpy() * count
        common = expected >= 5
        rest = [] if common.all() else [np.flatnonzero(~common)]
        cells = [*np.flatnonzero(common)[:, None], *rest]  # the rare tokens share one
        seen_cells = np.array([seen[cell].sum() for cell in cells])
        expected_cells = np.array([expected[cell].sum() for cell in cells])
        chi_square = float(((seen_cells - expected_cells) ** 2 / expected_cells).sum())
        freedom = len(seen_cells) - 1
        assert freedom >= 10
        assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations; the keys are fixed


def test_the_filters_of_each_row_bound_its_support() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, end_token_ids=())
    with torch.no_grad():
        probs = model(torch.tensor([PROMPTS[3]])).logits[0, -1].softmax(-1)
    ranked = probs.argsort(descending=True).tolist()
    mass = probs.sort(descending=True).values.cumsum(0)
    nucleus = ranked[: int((mass < 0.7).sum()) + 1]
    likely = [token for token in ranked if probs[token] >= 0.2 * probs.max()]
    wanted = {
        SamplingParams(1, top_k=3): set(ranked[:3]),
        SamplingParams(1, top_k=1): {ranked[0]},
        SamplingParams(1, top_p=0.7): set(nucleus),
        SamplingParams(1, min_p=0.2): set(likely),
        SamplingParams(1, top_k=2, top_p=0.99, min_p=0.01): set(ranked[:2]),
        SamplingParams(1, temperature=0.0): {ranked[0]},
    }
    assert 1 < len(nucleus) < VOCAB and 1 < len(likely) < VOCAB

    async def act() -> dict[SamplingParams, list[Sample]]:
        calls = {
            params: [asyncio.create_task(ask(engine, PROMPTS[3], params, (i,))) for i in range(300)]
            for params in wanted
        }
        return {params: [await call for call in row] for params, row in calls.items()}

    for params, samples in run(engine, model, act).items():
        assert {int(sample.tokens[-1]) for sample in samples} == wanted[params]
        for sample in samples[:20]:  # log-probs are of the distribution before the filters
            assert abs(float(sample.log_probs[-1]) - float(probs[sample.tokens[-1]].log())) < 1e-5


def test_the_key_alone_seeds_a_request() -> None:
    model = make_model(QWEN3)
    engine = make_engine(model, make_decoder(LeanDecoder, model))

    async def act() -> list[Sample]:
        task = Task(index=3, prompt="", tokens=(5,), label="x")
        keys: list[tuple[int, ...]] = [(1, 2), (1, 2), (2, 1), (1, 2, 0, 1), (12,)]
        return [await engine.generate(task, [5], SamplingParams(30), key) for key in keys]

    samples = run(engine, model, act)
    texts = [tuple(sample.tokens) for sample in samples]
    assert texts[0] == texts[1] and len(set(texts)) == 4
    assert samples[0].task.label == "x"


def test_a_stream_is_numpys_philox_read_at_any_place() -> None:
    key = stream_key((3, 1, 4))
    whole = np.random.Generator(np.random.Philox(key=key)).random(200, dtype=np.float32)
    streams = UniformStreams()
    for start, count in ((0, 64), (64, 64), (13, 51), (7, 1), (128, 72)):
        assert streams.read(key, start, count).tolist() == whole[start : start + count].tolist()
    assert streams.read(stream_key((3, 14)), 0, 9).tolist() != whole[:9].tolist()
