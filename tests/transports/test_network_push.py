"""The transports between nodes, as processes: trainer ranks, engines that record, and deaths in between."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import milepost
import pytest
from forked import forked
from milepost.errors import TransportError
from milepost.testing.engines import make_weights
from milepost.weights.transport import EngineInfo, RankInfo, World
from mooncake_here import has_mooncake
from push_worker import run_engine, run_rank

pytestmark = pytest.mark.takes(30)
SIZE = sum(tensor.numel() * tensor.element_size() for tensor in make_weights(0).values())
HELD = 15.0
"""Seconds that a push may wait for a member that does not answer."""


class Worker:
    """A process of `push_worker`."""

    def __init__(self, run: Callable[..., None], *arguments: Any) -> None:
        self.pipe, theirs = forked().Pipe()
        self.process = forked().Process(target=run, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def tell(self, **message: Any) -> None:
        self.pipe.send(message)

    def hear(self) -> dict[str, Any]:
        """The next answer; empty from a process that died."""
        try:
            return dict(self.pipe.recv())
        except (EOFError, ConnectionError):
            return {}

    def ask(self, **message: Any) -> dict[str, Any]:
        self.tell(**message)
        return self.hear()

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Site:
    """Two ranks and two engines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.engines = [Worker(run_engine) for _ in range(2)]
        self.ranks: list[Worker] = []
        self.endpoints = [worker.hear()["endpoint"] for worker in self.engines]
        self.start_ranks()

    def start_ranks(self) -> None:
        for worker in self.ranks:
            worker.close()
        store = self.folder / f"store-{time.monotonic_ns()}"
        self.ranks = [Worker(run_rank, rank, 2, str(store)) for rank in range(2)]
        assert [worker.hear() for worker in self.ranks] == [{"ready": True}] * 2

    def restart_engine(self, index: int) -> None:
        self.engines[index].close()
        self.engines[index] = Worker(run_engine)
        self.endpoints[index] = self.engines[index].hear()["endpoint"]

    def open(self, transport: str, *, staged: bool = False, verify: bool = True, timeout: float = 120.0) -> None:
        message = {"transport": transport, "staged": staged, "verify": verify, "timeout": timeout}
        for worker in self.ranks:
            worker.tell(op="open", engines=list(enumerate(self.endpoints)), **message)
        assert [worker.hear() for worker in self.ranks] == [{"ok": True}] * 2

    def push(self, version: int, engines: list[int] | None = None, **more: Any) -> list[dict[str, Any]]:
        for worker in self.ranks:
            worker.tell(op="push", version=version, engines=engines, **more)
        return [worker.hear() for worker in self.ranks]

    def states(self) -> list[Any]:
        """What each engine serves, bit for bit, or `fenced`."""
        found = [worker.ask(op="state") for worker in self.engines]
        assert not any(answer["wrong"] for answer in found)
        return ["fenced" if answer["fenced"] else answer["version"] for answer in found]

    def close(self) -> None:
        for worker in [*self.ranks, *self.engines]:
            worker.close()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("push"))
    yield made
    made.close()


def sent(*engines: int) -> dict[str, Any]:
    return {"ok": True, "bytes": SIZE * len(engines), "engines": list(engines)}


@pytest.mark.parametrize("staged", [False, True])
def test_a_broadcast_reaches_engines_of_other_processes(site: Site, staged: bool) -> None:
    site.open("broadcast", staged=staged)
    assert site.push(1) == [sent(0, 1), sent()]
    assert site.states() == [1, 1]
    assert site.push(2, [1]) == [sent(1), sent()]  # another group
    assert site.states() == [1, 2]
    assert site.push(3) == [sent(0, 1), sent()]
    assert site.push(4) == [sent(0, 1), sent()]  # the same group again
    assert site.states() == [4, 4]


@pytest.mark.parametrize("staged", [False, True])
def test_a_restarted_engine_is_filled_alone_and_a_dead_one_is_named(site: Site, staged: bool) -> None:
    site.open("broadcast", staged=staged, verify=False)
    assert site.push(1)[0]["ok"]
    site.engines[1].ask(op="fail", signal=signal.SIGKILL)
    answers = site.push(2)
    assert not answers[0]["ok"] and answers[0]["gone"] == site.endpoints[1]
    assert site.engines[0].ask(op="state")["fenced"]  # it may hold a part
    site.restart_engine(1)
    site.open("broadcast", staged=staged, verify=False)
    assert site.push(3, [1]) == [sent(1), sent()]
    assert site.states() == ["fenced", 3]
    assert site.push(4) == [sent(0, 1), sent()]
    assert site.states() == [4, 4]


def test_an_engine_that_hangs_costs_the_time_limit(site: Site) -> None:
    site.open("broadcast", timeout=HELD)
    assert site.push(1)[0]["ok"]
    site.engines[0].ask(op="fail", signal=signal.SIGSTOP)
    answers = site.push(2)
    assert not answers[0]["ok"] and answers[0]["gone"] == site.endpoints[0]
    assert site.engines[1].ask(op="state")["fenced"]
    site.restart_engine(0)


def test_a_sender_that_dies_leaves_engines_fenced_until_a_whole_push(site: Site) -> None:
    site.open("broadcast", verify=False)
    assert site.push(1)[0]["ok"]
    assert site.push(2, dies=0)[0] == {}
    assert site.states() == ["fenced", "fenced"]
    site.start_ranks()
    site.open("broadcast")
    assert site.push(3) == [sent(0, 1), sent()]
    assert site.states() == [3, 3]


def test_p2p_writes_to_engines_of_other_processes_or_says_what_is_missing(site: Site) -> None:
    site.open("p2p")
    if not has_mooncake():
        answers = site.push(1)
        assert all("pip install 'milepost[p2p]'" in answer["error"] for answer in answers)
        return
    assert site.push(1) == [sent(0), sent(1)]  # each rank writes to an engine of its own
    assert site.states() == [1, 1]
    assert site.push(2, [1]) == [sent(), sent(1)]
    assert site.push(3) == [sent(0), sent(1)]
    assert site.states() == [3, 3]
    site.engines[1].ask(op="fail", signal=signal.SIGKILL)
    answers = site.push(4)
    assert answers[0] == sent(0) and answers[1]["gone"] == site.endpoints[1]
    site.restart_engine(1)
    site.open("p2p")
    assert site.push(5, [1]) == [sent(), sent(1)]
    assert site.states() == [4, 5]


@pytest.mark.parametrize("name", ["broadcast", "p2p"])
def test_engines_that_no_line_goes_to_are_refused(name: str) -> None:
    transport = milepost.resolve("transport", name, {})
    world = World((RankInfo(0),))
    with pytest.raises(TransportError, match=r"engine 0 is at 'unix://here/a', and over a network engines are reached"):
        transport.open(world, [EngineInfo(0, "unix://here/a")])
    with pytest.raises(TransportError, match="share an index"):
        transport.open(world, [EngineInfo(0, "local:a"), EngineInfo(0, "local:b")])


def test_each_stage_has_a_sender_and_gpus_speak_nccl() -> None:
    ranks = tuple(RankInfo(r, device=f"GPU-{r}", tensor=r % 2, pipeline=r // 2) for r in range(4))
    transport = milepost.resolve("transport", "broadcast", {})
    details = transport.open(World(ranks), [EngineInfo(0, "http://10.0.0.2:1", ("GPU-9",))]).details
    assert (details["sources"], details["backend"]) == ([0, 2], "nccl")
    assert transport.open(World(ranks), [EngineInfo(0, "tcp://10.0.0.2:1/x")]).details["backend"] == "gloo"


def test_a_stranger_without_the_token_is_not_heard(site: Site) -> None:
    host, port = site.endpoints[0].removeprefix("tcp://").partition("/")[0].split(":")
    for greeting in (b"\x00\x00\x00\x02{}", b'\x00\x00\x00\x10{"token": "abc"}', b"\xff\xff\xff\xff"):
        with socket.create_connection((host, int(port)), timeout=60) as rude:
            rude.sendall(greeting)
            assert rude.recv(1) == b""
    site.open("broadcast")
    assert site.push(9)[0]["ok"]
