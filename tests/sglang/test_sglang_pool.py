"""The pool: where requests go, and what becomes of them when an engine dies.

The servers here speak SGLang's protocol and generate nothing, so that deaths cost milliseconds; the same with real ones
is in test_sglang_run.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from milepost.errors import EngineGone, MilepostError, RunError, TransportError
from milepost.rollout.engine import SamplingParams
from milepost.rollout.sglang import pool as pools
from milepost.rollout.sglang.engine import SGLangEngine
from milepost.rollout.sglang.pool import EnginePool, PoolSender
from milepost.samples import Sample, Status
from milepost.weights.transport import PushReport
from sglang_helpers import task

PARAMS = SamplingParams(4)


class StubServer:
    """Answers every request with one token after a while, and can die."""

    def __init__(self) -> None:
        self.version = -1
        self.delay = 0.01
        self.starts = 0
        self.served: list[list[int]] = []
        self.calls: list[str] = []
        self.fails_to_start = False
        self.hangs = False
        self.aborted = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self._port = 0
        self._connections: set[asyncio.Transport] = set()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def start(self) -> None:
        if self.fails_to_start:
            raise RunError("it does not come up")
        await self.die()
        self.starts += 1
        self.version = -1
        app = web.Application()
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/health_generate", self._health)
        for path in ("flush_cache", "release_memory_occupation", "resume_memory_occupation"):
            app.router.add_post(f"/{path}", self._control)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app, shutdown_timeout=0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self._port)
        await site.start()
        self._port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]

    async def stop(self) -> None:
        await self.die()

    async def die(self) -> None:
        if self._runner is not None:
            runner, self._runner = self._runner, None
            for transport in self._connections:
                transport.abort()
            self._connections.clear()
            self.aborted.set()  # cleaning up waits for whoever is still being answered
            await runner.cleanup()
            self.aborted = asyncio.Event()

    async def alive(self) -> bool:
        return self._runner is not None

    async def log_tail(self) -> str:
        return "the end of the stub's log"

    async def _generate(self, request: web.Request) -> web.Response:
        ids = (await request.json())["input_ids"]
        self.served.append(ids)
        assert request.transport is not None
        self._connections.add(request.transport)
        try:
            await asyncio.wait_for(self.aborted.wait(), self.delay)
            reason, out = {"type": "abort"}, []
        except TimeoutError:
            reason, out = {"type": "stop"}, [7]
        meta = {
            "finish_reason": reason,
            "output_token_logprobs": [[-0.5, token, None] for token in out],
            "weight_version": str(self.version),
        }
        return web.json_response({"output_ids": out, "meta_info": meta})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.hangs else 200)

    async def _control(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        return web.Response()

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.set()
        return web.Response()


class Fixture:
    """A pool over stubs, pushed to as version 0."""

    def __init__(self, count: int, stall_timeout: float) -> None:
        self.servers = [StubServer() for _ in range(count)]
        engines = [
            SGLangEngine(server, decode=str, end_token_ids=[1], vocab_size=100, max_positions=50, index=index)
            for index, server in enumerate(self.servers)
        ]
        self.events: list[str] = []
        self.pool = EnginePool(engines, on_event=self.events.append, stall_timeout=stall_timeout)
        self.refills: list[int] = []
        self.pool.refill = self.refill

    async def refill(self, index: int) -> PushReport:
        self.refills.append(index)
        self.servers[index].version = self.pool.version
        return PushReport(self.pool.version, 0, 0.0, (index,))

    def push(self, version: int) -> None:
        present = self.pool.fence()
        for index in present:
            self.servers[index].version = version
        self.pool.committed(version, present)

    async def until_served(self, *counts: int) -> None:
        """Wait until each server has been asked so often."""
        while [len(server.served) for server in self.servers] != list(counts):
            await asyncio.sleep(0.001)

    async def ask(self, index: int, tokens: tuple[int, ...] = (5, 6)) -> Sample:
        return await self.pool.generate(task(index, tokens), tokens, PARAMS, (index,))


def with_pool(
    count: int, test: Callable[[Fixture], Awaitable[None]], pushed: bool = True, stall_timeout: float = 1000.0
) -> Fixture:
    async def body() -> Fixture:
        made = Fixture(count, stall_timeout)
        await made.pool.start()
        if pushed:
            made.push(0)
        try:
            await asyncio.wait_for(test(made), 20)
        finally:
            await made.pool.stop()
        return made

    return asyncio.run(body())


def test_samples_of_a_prompt_go_to_one_engine_and_prompts_are_spread() -> None:
    async def test(made: Fixture) -> None:
        await asyncio.gather(*(made.ask(group, (5, 10 + group)) for group in range(8) for _ in range(4)))
        served = [sorted({ids[1] for ids in server.served}) for server in made.servers]
        assert sorted(map(len, served)) == [2, 2, 2, 2]
        assert sorted(group for groups in served for group in groups) == [10 + group for group in range(8)]
        assert [len(server.served) for server in made.servers] == [8, 8, 8, 8]
        home = next(i for i, groups in enumerate(served) if 13 in groups)
        await made.ask(3, (5, 13, 6, 7))  # a later turn
        assert made.servers[home].served[-1] == [5, 13, 6, 7]

    with_pool(4, test)


def test_a_prompt_leaves_its_engine_when_that_has_far_more_to_do() -> None:
    async def test(made: Fixture) -> None:
        await asyncio.gather(*(made.ask(0) for _ in range(40)))
        counts = sorted(len(server.served) for server in made.servers)
        assert sum(counts) == 40
        assert counts[0] >= 8

    with_pool(2, test)


def test_without_weights_no_request_is_taken() -> None:
    async def test(made: Fixture) -> None:
        with pytest.raises(RuntimeError, match="no engine takes requests: fenced; push weights first"):
            await made.ask(0)
        made.push(3)
        assert (await made.ask(0)).versions.tolist() == [-1, -1, 3]
        await made.pool.sleep(("weights", "kv_cache"))
        with pytest.raises(RuntimeError, match="no engine takes requests: kv_cache and weights asleep"):
            await made.ask(0)

    with_pool(2, test, pushed=False)


def test_an_engine_that_dies_is_replaced_refilled_and_its_requests_run_elsewhere() -> None:
    async def test(made: Fixture) -> None:
        for server in made.servers:
            server.delay = 0.2
        work = [asyncio.ensure_future(made.ask(group)) for group in range(8)]
        await made.until_served(4, 4)
        await made.servers[0].die()
        samples = await asyncio.gather(*work)
        assert {sample.status for sample in samples} == {Status.COMPLETED}
        while made.refills != [0] or not made.pool.engines[0].serving:
            await asyncio.sleep(0.01)
        assert made.servers[0].starts == 2
        assert await made.pool.healthy()

    made = with_pool(2, test)
    assert [text.split(":")[0] for text in made.events] == [
        "engine 0 is lost",
        "engine 0 is started again",
        "engine 0 serves version 0 again",
    ]


def test_requests_wait_for_the_only_engine_to_come_back() -> None:
    async def test(made: Fixture) -> None:
        made.servers[0].delay = 0.2
        work = [asyncio.ensure_future(made.ask(group)) for group in range(4)]
        await made.until_served(4)
        await made.servers[0].die()
        samples = await asyncio.gather(*work)
        assert [sample.tokens.tolist() for sample in samples] == [[5, 6, 7]] * 4
        assert made.refills == [0]

    with_pool(1, test)


def test_a_death_without_requests_is_noticed_and_so_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MONITOR_SECONDS", 0.02)

    async def test(made: Fixture) -> None:
        await made.servers[0].die()
        while made.refills != [0]:
            await asyncio.sleep(0.01)
        made.servers[1].hangs = True
        while not any("3 health checks in a row" in text for text in made.events):
            await asyncio.sleep(0.01)
        made.servers[1].hangs = False
        while made.refills != [0, 1]:
            await asyncio.sleep(0.01)

    with_pool(2, test)


def test_an_engine_that_dies_asleep_is_started_at_the_wake_and_pushed_to_with_the_others() -> None:
    async def test(made: Fixture) -> None:
        await made.pool.sleep(("weights", "kv_cache", "graphs"))
        await made.servers[1].die()
        await asyncio.sleep(0.05)
        assert made.servers[1].starts == 1  # its memory is the trainer's now
        await made.pool.wake(("weights",))
        assert made.servers[1].starts == 2
        assert made.pool.engines[1].asleep == {"kv_cache", "graphs"}
        made.push(1)
        await made.pool.wake(("kv_cache", "graphs"))
        await asyncio.gather(*(made.ask(group) for group in range(4)))
        assert [len(server.served) for server in made.servers] == [2, 2]
        assert made.refills == []

    with_pool(2, test)


def test_an_engine_that_dies_between_push_and_wake_is_refilled_alone() -> None:
    async def test(made: Fixture) -> None:
        await made.pool.sleep(("weights", "kv_cache"))
        await made.pool.wake(("weights",))
        made.push(1)
        await made.servers[0].die()
        await made.pool.wake(("kv_cache",))
        samples = await asyncio.gather(*(made.ask(group) for group in range(4)))
        assert {int(sample.versions[-1]) for sample in samples} == {1}
        while made.refills != [0]:
            await asyncio.sleep(0.01)

    with_pool(2, test)


def test_sleep_waits_for_an_engine_that_is_being_replaced() -> None:
    async def test(made: Fixture) -> None:
        await made.servers[0].die()
        await asyncio.gather(*(made.ask(group) for group in range(2)))
        await made.pool.sleep(("weights",))
        assert made.refills == [0]
        assert made.servers[0].calls == ["/flush_cache", "/release_memory_occupation"]

    with_pool(2, test)


def test_a_run_does_not_go_on_with_engines_that_cannot_be_replaced() -> None:
    async def test(made: Fixture) -> None:
        made.servers[0].fails_to_start = True
        await made.servers[0].die()
        with pytest.raises(RunError, match="an engine could not be replaced: it does not come up"):
            await made.ask(0)

    with_pool(1, test)

    async def again(made: Fixture) -> None:
        for _ in range(pools.MAX_RESTARTS):
            await made.servers[0].die()
            assert (await made.ask(0)).num_trainable == 1
        await made.servers[0].die()
        with pytest.raises(RunError, match=r"engine 0 died 4 times since the last push\n.*the stub's log"):
            await made.ask(0)

    with_pool(1, again)


def test_abort_reaches_requests_that_wait_for_an_engine() -> None:
    async def test(made: Fixture) -> None:
        release = asyncio.Event()

        async def slowly(index: int) -> PushReport:
            await release.wait()
            return await made.refill(index)

        made.pool.refill = slowly
        made.servers[0].delay = 0.5
        work = [asyncio.ensure_future(made.ask(group)) for group in range(3)]
        await made.until_served(3)
        await made.servers[0].die()
        await asyncio.sleep(0.05)
        await made.pool.abort()
        samples = await asyncio.gather(*work)
        release.set()
        assert [(sample.status, sample.num_trainable) for sample in samples] == [(Status.ABORTED, 0)] * 3

    with_pool(1, test)


def test_a_push_fences_and_only_a_whole_one_serves() -> None:
    async def test(made: Fixture) -> None:
        class Failing:
            def push(self, version: int, source: object, engines: Any = None) -> PushReport:
                assert not any(engine.serving for engine in made.pool.engines)
                raise TransportError("half way")

        class Whole:
            def push(self, version: int, source: object, engines: Any = None) -> PushReport:
                for index in engines:
                    made.servers[index].version = version
                return PushReport(version, 10, 0.1, tuple(engines))

        with pytest.raises(TransportError):
            PoolSender(Failing(), made.pool).push(5, source=None)  # type: ignore[arg-type]
        with pytest.raises(RuntimeError, match="fenced"):
            await made.ask(0)
        assert PoolSender(Whole(), made.pool).push(5, source=None).engines == (0, 1)  # type: ignore[arg-type]
        assert made.pool.version == 5
        assert (await made.ask(0)).versions[-1] == 5

    with_pool(2, test)


def test_an_engine_that_dies_in_a_push_is_left_out_and_refilled_alone() -> None:
    async def test(made: Fixture) -> None:
        class Dying:
            def push(self, version: int, source: object, engines: Any = None) -> PushReport:
                if 1 in engines:
                    raise EngineGone(made.servers[1].endpoint, "it is gone")
                for index in engines:
                    made.servers[index].version = version
                return PushReport(version, 10, 0.1, tuple(engines))

        await made.pool.sleep(("weights", "kv_cache"))
        await made.pool.wake(("weights",))
        report = PoolSender(Dying(), made.pool).push(4, source=None)  # type: ignore[arg-type]
        assert report.engines == (0,)
        assert made.pool.version == 4
        assert made.servers[1].starts == 1  # memory is the trainer's until the pool is awake
        await made.pool.wake(("kv_cache",))
        assert (await made.ask(0)).versions[-1] == 4
        while made.refills != [1] or not made.pool.engines[1].serving:
            await asyncio.sleep(0.01)
        assert [engine.version for engine in made.pool.engines] == [4, 4]

    with_pool(2, test)


def test_an_engine_that_answers_no_request_in_time_counts_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MONITOR_SECONDS", 0.02)

    async def test(made: Fixture) -> None:
        async def come_to_senses(index: int) -> PushReport:
            made.servers[index].delay = 0.01
            return await made.refill(index)

        made.pool.refill = come_to_senses
        made.servers[0].delay = 1000  # healthy all the while
        work = [asyncio.ensure_future(made.ask(group)) for group in range(4)]
        await made.until_served(2, 2)
        samples = await asyncio.gather(*work)
        assert {sample.status for sample in samples} == {Status.COMPLETED}
        while made.refills != [0]:
            await asyncio.sleep(0.01)

    made = with_pool(2, test, stall_timeout=1.0)
    assert made.events[0] == (
        "engine 0 is lost: none of its 2 requests was answered within cluster.stall_timeout (1 s)"
    )


def test_an_engine_without_memory_for_a_refill_waits_for_the_next_push() -> None:
    async def test(made: Fixture) -> None:
        async def no_room(index: int) -> None:
            return None

        made.pool.refill = no_room
        await made.servers[1].die()
        samples = await asyncio.gather(*(made.ask(group) for group in range(4)))
        assert {int(sample.versions[-1]) for sample in samples} == {0}
        await made.pool.sleep(("weights",))  # behind the restart
        assert made.servers[1].starts == 2
        await made.pool.wake(("weights",))
        made.push(1)
        assert [engine.version for engine in made.pool.engines] == [1, 1]

        for server in made.servers:
            await server.die()
        with pytest.raises(RunError, match=r"no engine is left .* engine 0 and engine 1 cannot be refilled before"):
            await made.ask(0)

    made = with_pool(2, test)
    assert "engine 1 waits for the next push: there is no memory for a refill now" in made.events


def test_what_ends_a_run_ends_its_requests_as_what_it_is() -> None:
    class RankLostError(MilepostError):
        exit_code = 3

    async def test(made: Fixture) -> None:
        for server in made.servers:
            server.delay = 1000
        work = [asyncio.ensure_future(made.ask(group)) for group in range(4)]
        await made.until_served(2, 2)
        made.pool.fail(RankLostError("a rank died"))
        results = await asyncio.gather(*work, return_exceptions=True)
        assert [type(result) for result in results] == [RankLostError] * 4
        with pytest.raises(RankLostError, match="a rank died"):
            await made.ask(0)

    made = with_pool(2, test)
    assert made.events == []


def test_an_answer_under_other_weights_is_an_error() -> None:
    async def test(made: Fixture) -> None:
        made.servers[0].version = 9
        with pytest.raises(RunError, match="answered with weights '9', expected version 0"):
            await made.ask(0)

    with_pool(1, test)
