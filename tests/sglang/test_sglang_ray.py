"""SGLang engines under Ray, two beside two trainer ranks, in one run that loses an engine, a rank, and goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner
from commands import Command
from milepost.cli import cli
from ray_cluster import ray_environment
from runs import lines

Write = Callable[..., Path]
pytestmark = pytest.mark.takes(90)

KILLING_REWARD = '''
"""The share of digits; while the second rollout is scored, and so still runs, it kills the server of engine 1."""
import os
import re
import signal
from pathlib import Path

import psutil

HERE = Path(__file__).parent


def kill_server():
    port = re.findall(r"starting on port (\\d+)", (HERE / "run" / "logs" / "engine-1.log").read_text())[-1]
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "milepost.rollout.sglang.launch" in command and f'"port": {port}' in command[3]:
            (HERE / "killed-engine").write_text(str(process.pid))
            process.send_signal(signal.SIGKILL)


def score(sample):
    metrics = HERE / "run" / "metrics.jsonl"
    if metrics.exists() and metrics.read_text() and not (HERE / "killed-engine").exists():
        kill_server()
    return sum(letter.isdigit() for letter in sample.text) / max(1, len(sample.text))
'''

DYING_TRANSPORT = '''
"""ipc, one tensor at a time. Rank 1 kills itself once, in the midst of the tensors of version 3."""
import os
import signal
from pathlib import Path

import milepost
from milepost.components import TransportTraits

MARK = Path(__file__).parent / "killed-rank"


class Source:
    def __init__(self, source, deadly):
        self.source, self.deadly, self.passes = source, deadly, 0

    def specs(self):
        return self.source.specs()

    def tensors(self):
        self.passes += 1  # the first pass makes the digests
        for number, named in enumerate(self.source.tensors()):
            if self.deadly and self.passes == 2 and number == 5:
                MARK.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield named


class Sender:
    def __init__(self, sender, rank):
        self.sender, self.rank = sender, rank

    def push(self, version, source, engines=None):
        deadly = self.rank == 1 and version == 3 and not MARK.exists()
        return self.sender.push(version, Source(source, deadly), engines)


class Transport:
    def __init__(self):
        from milepost_ipc.transport import IpcTransport

        self.ipc = IpcTransport(1)

    def open(self, world, engines):
        return self.ipc.open(world, engines)

    def sender(self, address, rank):
        return Sender(self.ipc.sender(address, rank), rank)


@milepost.hookimpl
def milepost_transports():
    traits = TransportTraits(colocated="required", tensors="full")
    return [milepost.Component("dying", milepost.NoOptions, traits, lambda options: Transport(), "Dies once.")]
'''

RUN: dict[str, Any] = {
    "rollout": {"num_rollouts": 4, "batch_size": 8, "samples_per_prompt": 4, "max_response_len": 16},
    # Two requests at once on each engine: a rollout takes a while, and most of it is still to come at the first score.
    "engine": {"backend": "sglang", "num_engines": 2, "max_running_requests": 2},
    "transport": {"name": "dying", "verify": True},
    "cluster": {"launcher": "ray", "cpu_ranks": 2},
    "plugins": {"modules": ["dying"]},
    "eval": {"interval": None, "before": False},
}


def servers_of(run_dir: Path) -> list[psutil.Process]:
    """Processes of SGLang servers that were started for a run."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd"]):
        if process.info["cwd"] == str(run_dir / "logs") and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def test_a_run_outlives_an_engine_and_a_restart_outlives_a_rank(write_config: Write) -> None:
    path = write_config(**RUN)
    folder, run_dir = path.parent, path.parent / "run"
    (folder / "score.py").write_text(KILLING_REWARD)
    (folder / "dying.py").write_text(DYING_TRANSPORT)
    command = ["train", path, "--no-progress", "--max-restarts", "1"]
    code, output = Command(*command, cwd=folder, environment=ray_environment()).finish(timeout=500)
    assert code == 0, output

    # the engine: lost in the second rollout, started again, and filled alone with what the other one served
    assert (folder / "killed-engine").exists()
    assert "engine 1 is lost: " in output
    assert "engine 1 is started again" in output
    assert "engine 1 serves version 1 again" in output
    assert "engine 0 is lost" not in output

    # the rank: an account that names it and the phase, then a new start from the checkpoint behind the third rollout
    assert re.search(r"error: trainer-1 \(process \d+\) died in phase 'push'", output), output
    assert "trainer-1: dead" in output and "restart 1 of 1" in output and "resuming after rollout 2" in output

    steps = lines(run_dir, "step")
    assert [step["index"] for step in steps] == [0, 1, 2, 3]
    # every sample was drawn from the whole of the weights that the trainer scores it with
    assert max(step["train/log_prob_diff_max"] for step in steps) < 1e-4
    assert all(step["train/grad_norm"] > 0 for step in steps)
    memory = {key for record in lines(run_dir, "perf") for key in record if "memory" in key}
    phases = ("generate", "sleep", "actor", "offload", "wake", "push", "serve")
    assert memory >= {f"perf/memory_{phase}" for phase in phases}
    assert set(json.loads((run_dir / "summary.json").read_text())["memory_gb"]) >= set(phases)

    # logs: two starts of one engine, three of the other
    starts = [(run_dir / "logs" / f"engine-{i}.log").read_text().count("milepost: starting on port") for i in (0, 1)]
    assert starts == [2, 3]
    shown = CliRunner().invoke(cli, ["logs", str(run_dir), "engine"])
    assert re.findall("==> (.*) <==", shown.output) == ["engine-0.log", "engine-1.log"]
    assert servers_of(run_dir) == []
