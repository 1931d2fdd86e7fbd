"""Whole runs with a real SGLang server beside the trainer: they learn, verify pushes, and outlive a killed engine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from commands import Command
from milepost.cli import cli
from runs import lines

Write = Callable[..., Path]
ENGINE = {"backend": "sglang", "max_running_requests": 64}
pytestmark = pytest.mark.takes(90)


def start(path: Path) -> Command:
    return Command("train", path, "--no-progress", cwd=path.parent)


def test_a_run_learns_and_outlives_its_engine(write_config: Write) -> None:
    path = write_config(
        engine=ENGINE,
        optimizer={"lr": 2e-3},
        transport={"verify": True},
        rollout={"num_rollouts": 30},
        eval={"interval": None},
        checkpoint={"save_interval": None},
    )
    run_dir = path.parent / "run"
    process = start(path)
    try:
        process.wait_until(lambda: len(lines(run_dir, "rollout")) >= 2)
        [leader] = [
            child
            for child in psutil.Process(process.pid).children()
            if "milepost.rollout.sglang.launch" in child.cmdline()
        ]
        family = [leader, *leader.children(recursive=True)]
        os.kill(leader.pid, signal.SIGKILL)
        code, output = process.finish()
    finally:
        process.kill()
    assert code == 0, output
    assert "engine 0 is lost" in output
    assert "engine 0 is started again" in output
    steps = lines(run_dir, "step")
    assert len(lines(run_dir, "rollout")) == len(steps) == 30
    # before and after the death, every sample was drawn from the weights the trainer scores it with
    assert max(step["train/log_prob_diff_max"] for step in steps) < 1e-4
    log = (run_dir / "logs" / "engine-0.log").read_text()
    assert log.count("--- milepost: starting on port") == 2
    rewards = [line["rollout/raw_reward"] for line in lines(run_dir, "rollout")]
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.03
    assert not [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_a_run_that_is_killed_takes_its_servers_with_it(write_config: Write) -> None:
    path = write_config(engine=ENGINE)
    process = start(path)
    try:

        def family() -> list[psutil.Process]:
            return psutil.Process(process.pid).children(recursive=True)

        process.wait_until(lambda: any("sglang::" in child.name() for child in family()) or len(family()) > 2)
        started = family()
    finally:
        process.kill()
    _, alive = psutil.wait_procs(started, timeout=120)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


def test_an_engine_that_does_not_start_is_one_message_with_the_end_of_its_log(write_config: Write) -> None:
    path = write_config(engine={**ENGINE, "options": {"attention_backend": "no-such-backend"}})
    code, output = start(path).finish()
    assert code == 1, output
    assert "a SGLang server ended while it started" in output
    assert f"the end of {path.parent / 'run' / 'logs' / 'engine-0.log'}" in output
    assert "no-such-backend" in output
    assert output.count("error:") == 1
    assert "milepost/cli" not in output  # the only traceback is SGLang's


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mem_fraction_statik": 0.5}, "did you mean 'mem_fraction_static'?"),
        ({"tp_size": 2}, "engine.options.tp_size: is decided by engine.gpus_per_engine; give that instead"),
    ],
)
def test_options_are_checked_before_anything_starts(write_config: Write, options: dict[str, Any], message: str) -> None:
    path = write_config(engine={**ENGINE, "options": options})
    done = CliRunner().invoke(cli, ["train", str(path)])
    assert done.exit_code == 2, done.output
    assert message in done.output
    assert "Traceback" not in done.output
