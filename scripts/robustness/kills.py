"""Kill a run again and again, resume it each time, and compare with a run that nobody disturbed.

    python scripts/robustness/kills.py                # 20 times `kill -9`

Every kill strikes at a random moment of one of these phases, in turn, wherever in the run it then is: while responses
are generated and scored, inside an optimizer step's turn (after a rollout's line, before its step's), inside a save
(while the hidden draft of a checkpoint lies in its folder), between save and the next rollout (the push of weights,
evaluation), while a process starts up, and at any time at all. What a kill really hit is read from what the process
left behind. At the end nothing may be missing or doubled: metrics.jsonl, but for performance and wall-clock times,
samples.jsonl, and the checkpoint's files equal those of the undisturbed run bit for bit. Exits 1 if they do not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from milepost.checkpoint import load_metadata, load_tensors
from small_run import make_project, metrics, output_of, start, write_config

POLL = 0.0005
"""Seconds between looks at what the run writes."""
LIMIT = 300.0
"""Seconds a run may take until it does what is waited for."""

PHASES = ("save", "optimizer", "generate", "save", "optimizer", "hand over", "any time", "startup")


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill and what it hit."""

    phase: str
    """Where it was aimed."""
    hit: str
    """Where the run was, from what it left behind."""
    wrote: str
    """The last line of metrics.jsonl that the process wrote."""
    resumes: str
    """The checkpoint that the next process goes on from."""


class Watch:
    """What one process writes into its run folder, looked at again and again without holding it up.

    What an earlier process left there is older than this one, by the times in the lines and of the folders.
    """

    def __init__(self, run_dir: Path, process: subprocess.Popen[str], since: float) -> None:
        self.run_dir = run_dir
        self.process = process
        self.since = since
        self.lines: list[str] = []
        """`KIND INDEX` of every line that this process has written, as of the last look."""

    def new_lines(self) -> list[str]:
        """Return the lines written since the last look."""
        path = self.run_dir / "metrics.jsonl"
        data = path.read_bytes() if path.exists() else b""
        whole = data[: data.rfind(b"\n") + 1]
        records = [json.loads(line) for line in whole.splitlines()]
        lines = [f"{record['kind']} {record['index']}" for record in records if record["time"] >= self.since]
        fresh = lines[len(self.lines) :]
        self.lines = lines
        return fresh

    def is_saving(self) -> bool:
        """Whether a save of this process goes on, or was cut off."""
        drafts = (self.run_dir / "checkpoints").glob(".rollout-*.saving")
        return any(modified(draft) >= self.since for draft in drafts)

    def until(self, seen: Callable[[], bool]) -> bool:
        """Wait for something; False if the process ends first."""
        deadline = time.monotonic() + LIMIT
        while not seen():
            if self.process.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"the run did nothing of interest for {LIMIT:g} s; see {output_of(self.run_dir)}")
            time.sleep(POLL)
        return True

    def until_line(self, kind: str) -> bool:
        """Wait for a new line of a kind."""
        return self.until(lambda: any(line.startswith(f"{kind} ") for line in self.new_lines()))


def size(path: Path) -> int:
    """Return a file's size, 0 where there is none."""
    return path.stat().st_size if path.exists() else 0


def modified(path: Path) -> float:
    """Return when something was changed, 0 where it has just gone."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def await_moment(watch: Watch, phase: str, draw: random.Random, length: float) -> bool:
    """Wait for a random moment of a phase; `length` is the seconds a rollout takes. False if the run ends first."""
    if phase == "startup":
        time.sleep(draw.uniform(0.05, 2.5))
        return watch.process.poll() is None
    # Some rollouts first, and thereby a save now and then: how far a process gets before it dies should vary.
    for _ in range(draw.randint(1, 12)):
        if not watch.until_line("step"):
            return False
    if phase == "any time":
        time.sleep(draw.uniform(0.0, 6 * length))
    elif phase == "save":
        if not watch.until(watch.is_saving):
            return False
        time.sleep(draw.uniform(0.0, 0.004))
    else:
        if phase != "generate" and not watch.until_line({"optimizer": "rollout", "hand over": "step"}[phase]):
            return False
        time.sleep(draw.uniform(0.0, 0.3 * length))
    return watch.process.poll() is None


def what_was_hit(watch: Watch) -> str:
    """Say where a killed run was, from the files it left."""
    if watch.is_saving():
        return "inside a save"
    if not watch.lines:
        return "while starting"
    return {
        "rollout": "inside an optimizer step",
        "step": "between step and push",
        "perf": "generating",
        "eval": "after an evaluation",
    }[watch.lines[-1].partition(" ")[0]]


def kill_once(config: Path, run_dir: Path, phase: str, draw: random.Random, length: float) -> Kill | None:
    """Start or resume the run, kill it in a phase; None if it came to its end before that."""
    since = time.time()
    process = start(config, run_dir)
    watch = Watch(run_dir, process, since)
    alive = await_moment(watch, phase, draw, length)
    process.kill()
    process.wait()
    if not alive:
        return None
    watch.new_lines()
    path = run_dir / "metrics.jsonl"
    complete = sorted((run_dir / "checkpoints").glob("rollout-*/manifest.json"))
    if path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size:
        wrote = "half a line"
    else:
        wrote = watch.lines[-1] if watch.lines else "nothing"
    return Kill(phase, what_was_hit(watch), wrote, complete[-1].parent.name if complete else "the start")


def differences(expected: Path, found: Path) -> list[str]:
    """Return what two finished runs differ in."""
    problems = []
    for name, read in (("metrics.jsonl", metrics), ("samples.jsonl", _lines)):
        one, other = read(expected), read(found)
        if len(one) != len(other):
            problems.append(f"{name}: {len(other)} lines, expected {len(one)}")
        unequal = [i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b]
        if unequal:
            problems.append(f"{name}: {len(unequal)} lines differ, the first is line {unequal[0] + 1}")
    one_state, other_state = _state(expected), _state(found)
    problems += [f"{name}: not the same" for name in sorted(one_state) if one_state[name] != other_state.get(name)]
    problems += [f"{name}: too many" for name in sorted(other_state.keys() - one_state.keys())]
    return problems


def _lines(run_dir: Path) -> list[Any]:
    return [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]


def _state(run_dir: Path) -> dict[str, Any]:
    """Return everything in the checkpoints' tensor files, tensors by their hash, and the summary without memory."""
    summary = json.loads((run_dir / "summary.json").read_text())
    state: dict[str, Any] = {"summary.json": {name: value for name, value in summary.items() if name != "memory_gb"}}
    for file in (run_dir / "checkpoints").rglob("*.safetensors"):
        name = str(file.relative_to(run_dir))
        state[f"{name} metadata"] = load_metadata(file)
        for key, tensor in load_tensors(file).items():
            digest = hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            state[f"{name} {key}"] = (tensor.dtype, tuple(tensor.shape), digest)
    return state


def main() -> None:
    """Run, kill, resume, compare; print where each kill struck and the verdict."""
    parser = argparse.ArgumentParser(description="kill -9 a run at random moments, resume it, and compare.")
    parser.add_argument("--kills", type=int, default=20, help="times to kill (default 20)")
    parser.add_argument("--rollouts", type=int, default=0, help="rollouts of the run (default 15 a kill)")
    parser.add_argument("--seed", type=int, default=0, help="which moments (default 0)")
    parser.add_argument("--policy", type=Path, help="folder made by examples/quickstart/make.py; default a tiny one")
    parser.add_argument("--keep", type=Path, help="leave everything in this folder, which must not exist")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.keep:
            folder = arguments.keep
            folder.mkdir(parents=True)
        sys.exit(compare(folder, arguments))


def compare(folder: Path, arguments: argparse.Namespace) -> int:
    """Do what `main` says inside a folder; return the exit code."""
    draw = random.Random(arguments.seed)
    num_rollouts = arguments.rollouts or 15 * arguments.kills
    make_project(folder, arguments.policy and arguments.policy.resolve())
    config = write_config(
        folder,
        rollout={"num_rollouts": num_rollouts, "samples_per_prompt": 8},
        checkpoint={"save_interval": 5},
        eval={"interval": 4, "datasets": [{"name": "heldout", "path": "heldout.jsonl"}]},
    )
    undisturbed, killed = folder / "undisturbed", folder / "killed"
    began = time.monotonic()
    if code := start(config, undisturbed).wait():
        print(f"the undisturbed run ended with exit code {code}:\n{output_of(undisturbed).read_text()[-2000:]}")
        return 1
    length = (time.monotonic() - began) / num_rollouts
    print(f"undisturbed: {num_rollouts} rollouts in {length * num_rollouts:.1f} s")
    print(f"{'kill':>4}  {'aimed at':10}  {'struck':24}  {'last line':24}  goes on from")
    kills: list[Kill] = []
    while len(kills) < arguments.kills:
        kill = kill_once(config, killed, PHASES[len(kills) % len(PHASES)], draw, length)
        if kill is None:
            print(f"the run came to its end after {len(kills)} kills; give more --rollouts")
            return 1
        kills.append(kill)
        print(f"{len(kills):>4}  {kill.phase:10}  {kill.hit:24}  {kill.wrote:24}  {kill.resumes}", flush=True)
    if code := start(config, killed).wait():
        print(f"the resumed run ended with exit code {code}:\n{output_of(killed).read_text()[-2000:]}")
        return 1
    inside = sum(kill.hit in ("inside a save", "inside an optimizer step") for kill in kills)
    problems = differences(undisturbed, killed)
    for problem in problems:
        print(f"DIFFERENT {problem}")
    lines = len(metrics(killed))
    verdict = "differs from" if problems else "equals bit for bit"
    print(
        f"{len(kills)} kills, {inside} of them inside a save or an optimizer step; the resumed run {verdict} "
        f"the undisturbed one: {lines} lines of metrics, {len(_lines(killed))} of samples, checkpoints, summary"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    main()
