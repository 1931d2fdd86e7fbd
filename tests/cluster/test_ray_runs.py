"""Whole runs on Ray: the numbers of an inline run, and what becomes of dead, stuck and failing processes."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from commands import Command
from milepost.cli import cli
from ray_cluster import ray_environment
from runs import logged, numbers

pytestmark = pytest.mark.takes(80)

BROKEN = '''
"""GRPO whose second rank sleeps forever, or raises, at its third step."""
import os
import time

import milepost
from milepost.components import AlgorithmTraits


class Options(milepost.Options):
    how: str


class Broken:
    def __init__(self, options):
        self.how, self.calls = options.how, 0
        self.grpo = milepost.resolve("algorithm", "grpo", {})

    def policy_loss(self, inputs):
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == "1":
            if self.how == "raise":
                raise ValueError("this algorithm is broken")
            time.sleep(10**6)
        return self.grpo.policy_loss(inputs)


@milepost.hookimpl
def milepost_algorithms():
    return [milepost.Component("broken", Options, AlgorithmTraits(group=True), Broken, "Breaks.")]
'''

DYING = '''
"""The usual generation; the engine's process is killed as rollout 2 asks it, and as rollout 5 has its first answer."""
import os
import re
import signal
from pathlib import Path

PER_ROLLOUT = 16
calls, kills = [], []


def kill():
    log = Path("engine-dies", "logs", "engine-0.log").read_text()
    kills.append(int(re.findall(r"process (\\d+)", log)[-1]))
    os.kill(kills[-1], signal.SIGKILL)


async def generate(task, engine):
    if engine.params.temperature == 0:
        return [await engine.generate()]  # of an evaluation
    calls.append(task)
    if len(calls) == 2 * PER_ROLLOUT + 1:
        kill()
    sample = await engine.generate()
    if len(calls) == 6 * PER_ROLLOUT and len(kills) == 1:
        kill()
    return [sample]
'''

CONFIG: dict[str, Any] = {
    "run": {"threads": 1, "device": "cpu"},
    "model": {"path": "model"},
    "data": {"path": "train.jsonl", "chat_template": True},
    "rollout": {"num_rollouts": 12, "batch_size": 4, "samples_per_prompt": 4, "max_response_len": 16},
    "reward": {"name": "python", "function": "score:score"},
    "algorithm": {"kl_loss_coef": 0.01},
    "optimizer": {"lr": 1e-3},
    "trainer": {"steps_per_rollout": 2},
    "checkpoint": {"save_interval": 2},
    "eval": {"interval": 6, "datasets": [{"name": "heldout", "path": "train.jsonl", "limit": 10}]},
}
RAY = ("cluster.launcher=ray",)
TWO_RANKS = (*RAY, "cluster.cpu_ranks=2")


@pytest.fixture(scope="module")
def folder(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ray")
    for name in ("model", "train.jsonl"):
        (out / name).symlink_to(policy / name)
    reward = "def score(sample):\n    return sum(map(str.isdigit, sample.text)) / max(1, len(sample.text))\n"
    (out / "score.py").write_text(reward)
    (out / "broken.py").write_text(BROKEN)
    (out / "dying.py").write_text(DYING)
    (out / "run.yaml").write_text(yaml.safe_dump(CONFIG))
    return out


def start(
    folder: Path,
    run_dir: str,
    *sets: str,
    cluster: str | None = None,
    flags: tuple[str, ...] = (),
    own_group: bool = False,
) -> Command:
    arguments = ["train", "run.yaml", "--no-progress", "--run-dir", run_dir, *flags]
    for item in sets:
        arguments += ["--set", item]
    return Command(*arguments, cwd=folder, environment=ray_environment(cluster), own_group=own_group)


def process_id(log: Path) -> int:
    return int(re.findall(r"process (\d+)", log.read_text())[-1])


@pytest.fixture(scope="module")
def finished(folder: Path, ray_cluster: str) -> dict[str, str]:
    """Name to output of undisturbed runs: inline, and on Ray with one rank and with two."""
    runs = {
        "inline": start(folder, "inline"),
        "one": start(folder, "one", *RAY, cluster=ray_cluster),
        "two": start(folder, "two", *TWO_RANKS, cluster=ray_cluster),
    }
    outputs = {}
    for name, process in runs.items():
        code, outputs[name] = process.finish()
        assert code == 0, outputs[name]
    return outputs


def test_one_rank_on_ray_gives_the_numbers_of_an_inline_run_bit_for_bit(folder: Path, finished: dict[str, str]) -> None:
    expected = numbers(folder / "inline")
    assert sum(record["kind"] == "step" for record in expected) == 24
    assert numbers(folder / "one") == expected


def assert_close(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.pop("kind") == theirs.pop("kind")
    assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_two_ranks_give_the_same_up_to_rounding(folder: Path, finished: dict[str, str]) -> None:
    # what 24 steps make of the rounding of a sum of gradients stays small, because the same tokens are sampled
    for mine, theirs in zip(numbers(folder / "two"), numbers(folder / "inline"), strict=True):
        assert_close(mine, theirs)


def test_a_cluster_that_is_named_is_joined_and_the_dashboard_is_spoken_of(
    ray_cluster: str, finished: dict[str, str]
) -> None:
    assert f"ray: cluster at {ray_cluster}, " in finished["one"]
    assert "dashboard" in finished["one"]
    assert "ray:" not in finished["inline"]


def test_every_process_has_a_log(folder: Path, finished: dict[str, str]) -> None:
    names = {path.name for path in (folder / "two" / "logs").iterdir()}
    assert {"controller.log", "trainer-0.log", "trainer-1.log", "engine-0.log"} <= names
    assert any(name.startswith("reward-") for name in names)
    assert "rollout 11: " in (folder / "two" / "logs" / "controller.log").read_text()
    shown = CliRunner().invoke(cli, ["logs", str(folder / "two"), "trainer"])
    assert shown.exit_code == 0
    assert re.findall("==> (.*) <==", shown.output) == ["trainer-0.log", "trainer-1.log"]


def test_a_killed_rank_ends_the_run_and_a_restart_goes_on_with_the_same_numbers(
    folder: Path, ray_cluster: str, finished: dict[str, str]
) -> None:
    def kill_after(process: Command, step: int) -> int:
        process.wait_until(lambda: logged(folder / "killed", "step", step))
        victim = process_id(folder / "killed" / "logs" / "trainer-1.log")
        os.kill(victim, signal.SIGKILL)
        return victim

    process = start(folder, "killed", *TWO_RANKS, cluster=ray_cluster)
    victim = kill_after(process, 5)
    code, output = process.finish()
    assert code == 3, output
    assert re.search(rf"error: trainer-1 \(process {victim}\) died in phase '\w+", output), output
    assert re.search(r"trainer-0: .* for \d+\.\d s", output) and "trainer-1: dead" in output
    assert f"log: {folder / 'killed' / 'logs' / 'trainer-1.log'}" in output
    assert "Traceback" not in output

    # no cluster is named: it starts one of its own, and another when it restarts
    process = start(folder, "killed", *TWO_RANKS, flags=("--max-restarts", "1"))
    kill_after(process, 13)
    code, output = process.finish()
    assert code == 0, output
    assert output.count("ray: cluster started here") == 2
    assert "restart 1 of 1" in output and output.count("resuming after rollout") == 2
    assert numbers(folder / "killed") == numbers(folder / "two")


def test_an_engine_that_dies_is_replaced_and_its_requests_run_again(
    folder: Path, ray_cluster: str, finished: dict[str, str]
) -> None:
    process = start(folder, "engine-dies", *TWO_RANKS, "rollout.generate=dying:generate", cluster=ray_cluster)
    code, output = process.finish()
    assert code == 0, output
    events = re.findall(
        r"^engine-0 \(process (\d+)\) died in phase 'generate'.*; it is started again \(death 1 of 3 until the next "
        r"push\), its (\d+) requests run again$",
        output,
        re.MULTILINE,
    )
    assert len(events) == 2 and events[0][0] != events[1][0], output
    assert int(events[0][1]) == 16 and 1 <= int(events[1][1]) < 16
    assert "resuming" not in output and "Traceback" not in output
    mine, theirs = numbers(folder / "engine-dies"), numbers(folder / "two")
    # up to the first death and beyond it, the same bits; then fewer run again together, which rounds differently
    same = next(i for i, line in enumerate(theirs) if line["kind"] == "rollout" and line["index"] == 5)
    assert mine[:same] == theirs[:same]
    for left, right in zip(mine, theirs, strict=True):
        assert_close(left, right)


def test_a_signal_to_the_process_group_saves_and_stops_a_run_with_a_cluster_of_its_own(
    folder: Path, finished: dict[str, str]
) -> None:
    process = start(folder, "stopped", *TWO_RANKS, own_group=True)
    process.wait_until(lambda: logged(folder / "stopped", "step", 4))
    os.killpg(process.pid, signal.SIGTERM)
    code, output = process.finish()
    assert code == 130, output
    assert "ray: cluster started here" in output
    assert "SIGTERM: finishing the current step and saving" in output and "died" not in output
    done = numbers(folder / "stopped")
    assert done == numbers(folder / "two")[: len(done)]
    last = max(line["index"] for line in done if line["kind"] == "step") // 2
    assert (folder / "stopped" / "checkpoints" / f"rollout-{last:06d}").is_dir()


def test_a_rank_that_hangs_is_found_and_one_that_fails_is_named(
    folder: Path, ray_cluster: str, finished: dict[str, str]
) -> None:
    sets = (*TWO_RANKS, "plugins.modules=[broken]", "algorithm.name=broken", "engine.num_engines=2")
    hanging = start(folder, "hangs", *sets, "algorithm.how=sleep", "cluster.stall_timeout=8", cluster=ray_cluster)
    failing = start(folder, "fails", *sets, "algorithm.how=raise", cluster=ray_cluster)
    code, output = hanging.finish()
    assert code == 3, output
    assert "did not leave phase 'step actor' within cluster.stall_timeout (8 s)" in output
    first, second = output.partition("\n  trainer-1: step actor for ")[::2]
    assert "sum_gradients" in first.partition("\n  trainer-0: step actor for ")[2]  # it waits for the other
    assert "time.sleep(10**6)" in second
    assert "engine-0: idle" in output
    with pytest.raises(ProcessLookupError):
        os.kill(process_id(folder / "hangs" / "logs" / "trainer-1.log"), 0)

    # before that it went as well as others, on two engines
    before = numbers(folder / "hangs")
    assert sum(record["kind"] == "step" for record in before) == 2
    for mine, theirs in zip(before, numbers(folder / "two"), strict=False):
        assert_close(mine, theirs)

    code, output = failing.finish()
    assert code == 1, output
    assert "error: trainer-1 failed with ValueError: this algorithm is broken" in output
    assert "ValueError: this algorithm is broken" in (folder / "fails" / "logs" / "trainer-1.log").read_text()
