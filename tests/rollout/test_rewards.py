"""The reward pool with real worker processes, whatever a reward does in them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from milepost.config.schema import RewardSection
from milepost.errors import MilepostError, RunError
from milepost.rollout.rewards import RewardPool, Scored
from milepost.rollout.rewards.process import LOG_LIMIT
from milepost.samples import Sample, Task

T = TypeVar("T")

CODE = r"""
import asyncio, ctypes, os, re, signal, subprocess, sys, time

def length(sample):
    return len(sample.text)

def named(sample):
    return {"reward": float(sample.task.label), "length": len(sample)}

def imports_torch(sample):
    return float("torch" in sys.modules)

def does(sample):
    text = sample.text
    if text == "sleep": time.sleep(60)
    if text == "regex": re.match(r"(a+)+$", "a" * 40 + "b")
    if text == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if text == "exit": os._exit(3)
    if text == "segfault": ctypes.string_at(0)
    if text == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if text == "sys.exit": sys.exit("bye")
    if text == "raise": raise KeyError("lost")
    if text == "recurse": return does(sample)
    if text == "memory": return len(bytearray(2 << 30))
    if text == "nan": return float("nan")
    if text == "none": return None
    if text == "text": return "1.0"
    if text == "close": os.closerange(3, 1024)
    if text == "garbage":
        for fd in range(3, 1024):
            try: os.write(fd, b"{]\n")
            except OSError: pass
        time.sleep(60)
    if text == "flood":
        sockets = [int(fd) for fd in os.listdir("/proc/self/fd") if "socket" in os.path.realpath(f"/proc/self/fd/{fd}")]
        while True:
            os.write(sockets[0], b"1" * (1 << 20))
    if text == "fork" and os.fork() == 0:
        return 5.0
    return 1.0

def prints(sample):
    for _ in range(4):
        print("x" * (1 << 20))
        print("y" * (1 << 20), file=sys.stderr)
    return 1.0

def spawns(sample):
    # One grandchild in the worker's group, one that left it, one forked that holds the worker's socket.
    children = [
        subprocess.Popen(["sleep", "300"]).pid,
        subprocess.Popen(["sleep", "300"], start_new_session=True).pid,
    ]
    pid = os.fork()
    if pid == 0:
        time.sleep(300)
    with open(sample.task.label, "a") as file:
        file.write(" ".join(map(str, [*children, pid])) + "\n")
    if sample.text == "sleep": time.sleep(60)
    if sample.text == "exit": os._exit(1)
    return 1.0

async def waits(sample):
    if sample.text == "late": await asyncio.sleep(60)
    if sample.text == "block": time.sleep(60)
    if sample.text == "exit":
        await asyncio.sleep(0.05)
        os._exit(3)
    if sample.text == "raise": raise KeyError("lost")
    await asyncio.sleep(0.2)
    return 1.0

waiting, together = 0, asyncio.Event()

async def overlapping(sample):
    global waiting
    waiting += 1
    if waiting == 20: together.set()
    await together.wait()  # for ever, if they come one after the other
    return float(sample.task.index)

def ranks(samples):
    if samples[0].text == "raise": raise KeyError("lost")
    if samples[0].text == "short": return [1.0]
    return [{"reward": rank, "size": len(samples)} for rank, _ in enumerate(samples)]
"""


def sample(text: str = "", index: int = 0, *, group: int = 0, label: Any = None) -> Sample:
    return Sample(
        task=Task(index, "prompt", (1, 2, 3), label),
        tokens=np.arange(30, dtype=np.int32),
        trainable=np.ones(30, np.bool_),
        log_probs=np.zeros(30, np.float32),
        versions=np.zeros(30, np.int32),
        text=text,
        group=group,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "reward_acts.py").write_text(CODE)
    return tmp_path


def make(folder: Path, act: str, **settings: Any) -> RewardPool:
    section = RewardSection.model_validate(
        {"name": "python", "function": f"reward_acts:{act}", "timeout": 20.0} | settings
    )
    return RewardPool(section, base_dir=folder, log_dir=folder / "logs")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def values(scored: Sequence[Scored]) -> list[float]:
    return [one.rewards["reward"] for one in scored]


def kinds(scored: Sequence[Scored]) -> list[str | None]:
    return [one.failure.kind if one.failure else None for one in scored]


def wait_until_gone(pids: Sequence[int], seconds: float = 5.0) -> None:
    """Fail if a process is there after a while; a child of ours that nobody waited for would be."""
    deadline = time.monotonic() + seconds
    for pid in pids:
        while _state(pid) not in ("gone", "Z" if _parent(pid) != os.getpid() else "gone"):
            assert time.monotonic() < deadline, f"process {pid} is still there: {_state(pid)}"
            time.sleep(0.02)


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    return (_stat(pid) or ["gone"])[0]


def _parent(pid: int) -> int:
    return int((_stat(pid) or ["", "0"])[1])


def test_scores_come_in_the_order_of_the_samples(folder: Path) -> None:
    with make(folder, "length", workers=2) as pool:
        scored = run(pool.score([sample("x" * (index * 7 % 50)) for index in range(300)]))
        pids = pool.worker_pids
        stats = pool.stats()
        assert len(pids) == 2
    assert values(scored) == [index * 7 % 50 for index in range(300)]
    assert (stats.scored, stats.failures, stats.restarts) == (300, 0, 0)
    wait_until_gone(pids)


def test_several_calls_overlap_and_none_is_fine(folder: Path) -> None:
    async def work(pool: RewardPool) -> None:
        results = await asyncio.gather(*(pool.score([sample("x" * n), sample("y")]) for n in range(20)))
        assert [values(result) for result in results] == [[n, 1.0] for n in range(20)]
        assert await pool.score([]) == []

    with make(folder, "length") as pool:
        run(work(pool))


def test_named_rewards_labels_and_tokens_reach_both_sides(folder: Path) -> None:
    with make(folder, "named") as pool:
        assert run(pool.score([sample(label=0.25)]))[0] == Scored({"reward": 0.25, "length": 30.0})


def test_a_worker_is_light(folder: Path) -> None:
    with make(folder, "imports_torch") as pool:
        assert values(run(pool.score([sample()]))) == [0.0]


def test_512_samples_take_a_fraction_of_a_second(folder: Path) -> None:
    async def work(pool: RewardPool) -> float:
        await pool.start()
        times = []
        for _ in range(3):
            began = time.perf_counter()
            await pool.score([sample("x" * 30) for _ in range(512)])
            times.append(time.perf_counter() - began)
        return min(times)

    with make(folder, "length") as pool:
        assert run(work(pool)) < 0.5


def test_every_kind_of_failure_costs_one_sample_its_score(folder: Path) -> None:
    expected = {
        "a": None,
        "exit": "crash",
        "segfault": "crash",
        "b": None,
        "kill": "crash",
        "sys.exit": "exception",
        "raise": "exception",
        "recurse": "exception",
        "memory": "memory",
        "nan": "invalid",
        "none": "invalid",
        "text": "invalid",
        "close": "crash",
        "garbage": "crash",
        "flood": "crash",
        "fork": None,
        "c": None,
    }
    with make(folder, "does", workers=2, memory_gb=1.0, on_error=-1.0) as pool:
        scored = run(pool.score([sample(text) for text in expected]))
        stats, pids = pool.stats(), pool.worker_pids
    assert dict(zip(expected, kinds(scored), strict=True)) == expected
    assert values(scored) == [1.0 if kind is None else -1.0 for kind in expected.values()]
    assert stats.failed == {"crash": 6, "exception": 3, "memory": 1, "invalid": 3}
    assert (stats.scored, stats.failures, stats.restarts) == (17, 13, 7)
    details = {text: one.failure.detail for text, one in zip(expected, scored, strict=True) if one.failure}
    assert "KeyError: 'lost'" in details["raise"]
    assert "exited with code 3" in details["exit"]
    assert "SIGSEGV" in details["segfault"]
    assert "in does" in details["segfault"]
    assert "SIGKILL" in details["kill"]
    assert "MemoryError" in details["memory"]
    assert "the reward is nan; expected a finite number" in details["nan"]
    wait_until_gone(pids)


def test_a_hang_is_killed_at_the_limit_and_says_where_it_was(folder: Path) -> None:
    texts = ["a", "sleep", "b", "regex", "stop", "c"]
    with make(folder, "does", timeout=0.6) as pool:
        run(pool.start())
        scored = run(pool.score([sample(text) for text in texts]))
        stats = pool.stats()
    assert kinds(scored) == [None, "timeout", None, "timeout", "timeout", None]
    assert values(scored) == [1.0, 0.0, 1.0, 0.0, 0.0, 1.0]
    assert stats.failed == {"timeout": 3}
    assert stats.seconds >= 1.8
    for place in (1, 3):
        failure = scored[place].failure
        assert failure is not None
        assert "no score within 0.6 s" in failure.detail
        assert "in does" in failure.detail


def test_a_slow_controller_is_not_held_against_a_reward(folder: Path) -> None:
    async def work(pool: RewardPool) -> list[Scored]:
        await pool.start()
        # Longer than the limit, neither the event loop nor any other thread gets a turn.
        asyncio.get_running_loop().call_later(0.01, sum, range(60_000_000))
        return await pool.score([sample("x") for _ in range(400)])

    with make(folder, "length", timeout=0.4) as pool:
        assert kinds(run(work(pool))) == [None] * 400


def test_the_event_loop_goes_on_while_rewards_run(folder: Path) -> None:
    async def work(pool: RewardPool) -> int:
        await pool.start()
        scoring = asyncio.ensure_future(pool.score([sample("sleep")]))
        turns = 0
        while not scoring.done():
            await asyncio.sleep(0.01)
            turns += 1
        return turns

    with make(folder, "does", timeout=0.5) as pool:
        assert run(work(pool)) > 20


@pytest.mark.parametrize("act", ["return", "sleep", "exit"])
def test_grandchildren_go_with_their_worker(folder: Path, act: str) -> None:
    notes = folder / "pids"
    with make(folder, "spawns", timeout=0.5) as pool:
        run(pool.score([sample(act, label=str(notes))]))
        grandchildren = [int(pid) for pid in notes.read_text().split()]
        assert len(grandchildren) == 3
        if act == "return":
            assert "gone" not in [_state(pid) for pid in grandchildren]
        else:
            wait_until_gone(grandchildren)
    wait_until_gone(grandchildren)


def test_output_is_kept_up_to_a_limit_and_blocks_nobody(folder: Path) -> None:
    with make(folder, "prints") as pool:
        assert values(run(pool.score([sample(), sample()]))) == [1.0, 1.0]
    log = (folder / "logs" / "reward-0.log").read_bytes()
    assert log.startswith(b"x" * 1000)
    assert log.endswith(b"further output is dropped]\n")
    assert LOG_LIMIT <= len(log) < LOG_LIMIT + 200


def test_asynchronous_rewards_overlap_in_one_worker(folder: Path) -> None:
    with make(folder, "overlapping", timeout=60) as pool:
        assert values(run(pool.score([sample(index=index) for index in range(40)]))) == list(range(40))


def test_an_asynchronous_reward_that_fails_costs_the_others_nothing(folder: Path) -> None:
    with make(folder, "waits", timeout=0.6) as pool:
        texts = ["a", "late", "b", "raise", "c"]
        scored = run(pool.score([sample(text) for text in texts]))
        assert kinds(scored) == [None, "timeout", None, "exception", None]
        assert pool.stats().restarts == 0


def test_among_overlapping_calls_the_one_to_blame_is_found(folder: Path) -> None:
    with make(folder, "waits", timeout=0.5) as pool:
        assert kinds(run(pool.score([sample(text) for text in ("a", "exit", "b")]))) == [None, "crash", None]
        assert kinds(run(pool.score([sample(text) for text in ("a", "block", "b")]))) == [None, "timeout", None]


@pytest.mark.parametrize("placement", ["process", "inline"])
def test_a_group_is_scored_at_once(folder: Path, placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    samples = [sample(group=group) for group in (1, 1, 2, 1, 2)]
    samples += [sample("raise", group=3), sample(group=3), sample("short", group=4), sample(group=4)]
    with make(folder, "ranks", scope="group", placement=placement) as pool:
        scored = run(pool.score(samples))
        assert pool.stats().failed == {"exception": 2, "invalid": 2}
    assert values(scored) == [0, 1, 0, 2, 1, 0, 0, 0, 0]
    assert [one.rewards.get("size") for one in scored[:5]] == [3, 3, 2, 3, 2]
    assert kinds(scored) == [None] * 5 + ["exception"] * 2 + ["invalid"] * 2
    sys.modules.pop("reward_acts", None)


def test_inline_has_the_same_interface(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    with make(folder, "does", placement="inline", on_error=0.5) as pool:
        scored = run(pool.score([sample(text) for text in ("a", "raise", "nan", "sys.exit", "b")]))
        assert pool.worker_pids == []
        assert pool.stats().failed == {"exception": 2, "invalid": 1}
    assert kinds(scored) == [None, "exception", "invalid", "exception", None]
    assert values(scored) == [1.0, 0.5, 0.5, 0.5, 1.0]
    with make(folder, "overlapping", placement="inline", timeout=60) as pool:
        assert values(run(pool.score([sample(index=index) for index in range(20)]))) == list(range(20))
    sys.modules.pop("reward_acts", None)


def test_the_error_budget_stops_a_rollout_with_the_first_traceback(folder: Path) -> None:
    async def work(pool: RewardPool) -> None:
        pool.reset_stats(expected=8)
        assert kinds(await pool.score([sample("raise")] * 2 + [sample("a")] * 2)).count("exception") == 2
        with pytest.raises(RunError, match=r"(?s)failed for 3 of 5 .*\(3 exception\); .* 0.25 of 8.*KeyError: 'lost'"):
            await pool.score([sample("raise"), sample("a")])

    with make(folder, "does", error_budget=0.25) as pool:
        run(work(pool))
        with pytest.raises(RunError, match="failed for 3 of"):
            pool.check_budget()
        pool.reset_stats()
        pool.check_budget()
        assert pool.stats().scored == 0


def test_without_an_expected_number_a_few_failures_at_the_start_are_not_a_share(folder: Path) -> None:
    with make(folder, "does", error_budget=0.5) as pool:
        assert kinds(run(pool.score([sample("raise")] * 8))) == ["exception"] * 8
        with pytest.raises(RunError, match="failed for 8 of 8 samples"):
            pool.check_budget()
        with pytest.raises(RunError, match="failed for 33 of 33 samples"):
            run(pool.score([sample("raise")] * 60))


def test_without_a_score_for_failures_the_first_one_stops_the_run(folder: Path) -> None:
    with make(folder, "does", on_error=None) as pool:
        with pytest.raises(RunError, match=r"(?s)\(exception\) and reward.on_error is null.*KeyError: 'lost'"):
            run(pool.score([sample("a"), sample("raise"), sample("b")]))
        assert values(run(pool.score([sample("a")]))) == [1.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"function": "reward_acts:lenght"}, "has no 'lenght'; it has"),
        ({"function": "no_such_module:score"}, "put it beside the run config"),
        ({"function": "reward_raises:score"}, r"(?s)could not be built in its worker.*ZeroDivisionError"),
        (
            {"function": "reward_exits:score"},
            r"(?s)ended before its reward was built: it exited with code 7.*last words",
        ),
        ({"name": "pyhton"}, "python"),
        ({"scope": "batch"}, "scope"),
    ],
)
def test_a_reward_that_cannot_be_built_is_reported(folder: Path, settings: dict[str, str], message: str) -> None:
    (folder / "reward_raises.py").write_text("1 / 0\n")
    (folder / "reward_exits.py").write_text("import os\nprint('last words')\nos._exit(7)\n")
    with make(folder, "length", workers=2, **settings) as pool:
        for _ in range(2):
            with pytest.raises(RunError, match=message):
                run(pool.score([sample()]))


def test_workers_that_never_last_until_a_call_stop_the_run(folder: Path) -> None:
    (folder / "reward_leaves.py").write_text(
        "import os, threading, time\n"
        "def leave():\n    time.sleep(0.05)\n    os._exit(9)\n"
        "threading.Thread(target=leave, daemon=True).start()\n"
        "def score(sample):\n    return 1.0\n"
    )

    async def work(pool: RewardPool) -> None:
        await pool.start()
        idle = 0
        while idle < 20:  # a replacement has a process id at once, so a second without one means that none will come
            await asyncio.sleep(0.05)
            idle = 0 if pool.worker_pids else idle + 1
        await pool.score([sample()])

    pool = make(folder, "length", function="reward_leaves:score")
    with pool, pytest.raises(RunError, match="5 reward workers in a row ended by themselves"):
        run(work(pool))


def test_a_hook_module_beside_the_run_config_is_found_by_the_workers(folder: Path) -> None:
    (folder / "house_rules.py").write_text(
        "import milepost\nfrom milepost.components import RewardTraits\n"
        "class Options(milepost.Options):\n    bonus: float\n"
        "class House:\n"
        "    def __init__(self, bonus): self.bonus = bonus\n"
        "    def score(self, sample): return len(sample.text) + self.bonus\n"
        "@milepost.hookimpl\n"
        "def milepost_rewards():\n"
        "    return [milepost.Component('house', Options, RewardTraits(), lambda o: House(o.bonus), 'Ours.')]\n"
    )
    section = RewardSection.model_validate({"name": "house", "bonus": 0.5})
    settings: dict[str, Any] = {"base_dir": folder, "log_dir": folder / "logs", "plugin_modules": ["house_rules"]}
    with RewardPool(section, **settings) as pool:
        assert values(run(pool.score([sample("xyz")]))) == [3.5]
    with (
        RewardPool(section, **settings, plugins_block=["house_rules"]) as pool,
        pytest.raises(RunError, match="blocked"),
    ):
        run(pool.score([sample("xyz")]))


@pytest.mark.parametrize(
    ("name", "label", "score"), [("deepscaler", "8", 1.0), ("deepscaler", 9, 0.0), ("math", 8, 1.0)]
)
def test_the_rewards_that_ship_with_milepost_run_in_workers(folder: Path, name: str, label: Any, score: float) -> None:
    with RewardPool(RewardSection(name=name), base_dir=folder, log_dir=folder / "logs") as pool:
        assert run(pool.score([sample("3+5</think>\\boxed{8}", label=label)])) == [Scored({"reward": score})]


def test_giving_up_on_a_call_leaves_the_pool_usable(folder: Path) -> None:
    async def work(pool: RewardPool) -> None:
        await pool.start()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(pool.score([sample("sleep")] * 50), 0.1)
        assert values(await pool.score([sample("a")])) == [1.0]

    with make(folder, "does", timeout=0.5) as pool:
        run(work(pool))
        # The first of them runs into its limit; the others are dropped with the worker they were sent to.
        assert pool.stats().restarts == 1


def test_closing_ends_what_goes_on_and_may_be_done_twice(folder: Path) -> None:
    async def work(pool: RewardPool) -> None:
        await pool.start()
        scoring = asyncio.ensure_future(pool.score([sample("sleep")]))
        await asyncio.sleep(0.1)
        pids = pool.worker_pids
        pool.close()
        with pytest.raises(RunError, match="closed"):
            await scoring
        wait_until_gone(pids)
        with pytest.raises(MilepostError, match="closed"):
            await pool.score([sample("a")])

    pool = make(folder, "does")
    run(work(pool))
    pool.close()


def test_workers_die_with_a_controller_that_is_killed(folder: Path) -> None:
    program = (
        "import asyncio, sys\nsys.path.insert(0, sys.argv[1])\n"
        "from test_rewards import make, sample\nfrom pathlib import Path\n"
        "async def work():\n"
        "    pool = make(Path(sys.argv[2]), 'does')\n"
        "    await pool.start()\n"
        "    scoring = asyncio.ensure_future(pool.score([sample('regex')]))\n"
        "    await asyncio.sleep(0.3)\n"
        "    print(*pool.worker_pids, flush=True)\n"
        "    await scoring\n"
        "asyncio.run(work())\n"
    )
    command = [sys.executable, "-c", program, str(Path(__file__).parent), str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as controller:
        assert controller.stdout is not None
        pids = [int(pid) for pid in controller.stdout.readline().split()]
        assert len(pids) == 1
        controller.send_signal(signal.SIGKILL)
    wait_until_gone(pids)
