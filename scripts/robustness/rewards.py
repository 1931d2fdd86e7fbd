"""Train with rewards that misbehave, one run for each kind: what it cost, and what was recorded.

    python scripts/robustness/rewards.py               # all kinds
    python scripts/robustness/rewards.py hang fork     # some

In each run two samples of every rollout (the first of two groups) meet the bad behaviour, the others get the share of
digits in the response.
The table shows per run: its exit code, the seconds of a rollout beside those of a run whose rewards behave, the
failures by kind and the workers replaced that metrics.jsonl has, the scores that failed samples got in samples.jsonl,
bytes in the reward's log, and processes of the run that are left. A run that does not end well, a failure that is not
recorded, a sample that did not cost its score, or a process that is left is a MISS and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from small_run import make_project, output_of, start, write_config

ON_ERROR = -7.0
"""Score of a failed reward: no good one is like it."""
TIMEOUT = 1.5
MARK = "MILEPOST_ROBUSTNESS_RUN"
"""Environment variable that all processes of a run inherit."""
BAD_PER_ROLLOUT = 2
ROLLOUTS = 3

CODE = """
import asyncio, ctypes, os, pathlib, signal, subprocess, sys, threading, time

BEHAVIOUR = os.environ["MILEPOST_ROBUSTNESS_REWARD"]

class Odd:
    def __float__(self): raise KeyboardInterrupt

KEPT = []

def behave(sample):
    b = BEHAVIOUR
    if b == "hang": time.sleep(600)
    if b == "busy":
        while True: pass
    if b == "deaf":
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}: signal.signal(number, signal.SIG_IGN)
        time.sleep(600)
    if b == "stop": os.kill(os.getpid(), signal.SIGSTOP)
    if b == "raise": raise ValueError("no such thing")
    if b == "SystemExit": raise SystemExit(0)
    if b == "KeyboardInterrupt": raise KeyboardInterrupt
    if b == "os._exit": os._exit(0)
    if b == "segfault": ctypes.string_at(0)
    if b == "abort": os.abort()
    if b == "kill group": os.killpg(0, signal.SIGTERM); time.sleep(600)
    if b == "recursion": return behave(sample)
    if b == "memory": return [bytearray(1 << 28) for _ in range(64)]
    if b == "leak": KEPT.append(bytes(900 << 20)); return 0.5  # not touched, and so had at once
    if b == "print":
        for _ in range(40): print("x" * (1 << 20))
        return 0.5
    if b == "print binary": os.write(1, bytes(range(256)) * 4096); return 0.5
    if b == "NaN": return float("nan")
    if b == "infinity": return float("inf")
    if b == "None": return None
    if b == "text": return "1.0"
    if b == "huge number": return 10 ** 400
    if b == "odd number": return Odd()
    if b == "mapping": return {"score": 1.0}
    if b == "big answer": return {"reward": 0.5, "x" * (20 << 20): 1.0}
    if b == "chdir": os.chdir("/proc"); return 0.5
    if b == "close fds": os.closerange(0, 256); return 0.5
    if b == "garbage":
        for fd in range(3, 64):
            try: os.write(fd, b"{]\\\\n")
            except OSError: pass
        time.sleep(600)
    if b == "fork":
        if os.fork() == 0: time.sleep(600)
        return 0.5
    if b == "fork, both answer": os.fork(); return 0.5
    if b == "grandchild":
        subprocess.Popen(["sleep", "600"], start_new_session=True); return 0.5
    if b == "grandchild, then hang":
        subprocess.Popen(["sleep", "600"], start_new_session=True); time.sleep(600)
    if b == "threads":
        for _ in range(10): threading.Thread(target=time.sleep, args=(0.2,)).start()
        return 0.5
    if b == "thread that exits":
        threading.Thread(target=lambda: (time.sleep(0.02), os._exit(4))).start(); time.sleep(600)
    if b == "changes the sample": sample.tokens[:] = 0; sample.text = None; sample.rewards["reward"] = 99.0; return 0.5
    if b == "breaks imports": sys.modules.clear(); sys.path.clear(); return 0.5
    return 0.5

def score(sample):
    # The first samples of the first two groups.
    if sample.rollout in (0, 4): return behave(sample)
    return sum(letter.isdigit() for letter in sample.text) / max(1, len(sample.text))

async def score_async(sample):
    await asyncio.sleep(0.001)
    if sample.rollout in (0, 4):
        if BEHAVIOUR == "async hang": await asyncio.sleep(600)
        if BEHAVIOUR == "async block": time.sleep(600)
        if BEHAVIOUR == "async swallow":
            while True:
                try: await asyncio.sleep(600)
                except asyncio.CancelledError: pass
    return sum(letter.isdigit() for letter in sample.text) / max(1, len(sample.text))
"""

EXPECTED: dict[str, str | None] = {
    "good": None,
    "hang": "timeout",
    "busy": "timeout",
    "deaf": "timeout",
    "stop": "timeout",
    "async hang": "timeout",
    "async block": "timeout",
    "async swallow": "timeout",
    "raise": "exception",
    "SystemExit": "exception",
    "KeyboardInterrupt": "crash",
    "recursion": "exception",
    "os._exit": "crash",
    "segfault": "crash",
    "abort": "crash",
    "kill group": "crash",
    "close fds": "crash",
    "garbage": "crash",
    "thread that exits": "crash",
    "big answer": "crash",
    "memory": "memory",
    "leak": "memory",
    "NaN": "invalid",
    "infinity": "invalid",
    "None": "invalid",
    "text": "invalid",
    "huge number": "invalid",
    "odd number": "crash",
    "mapping": "invalid",
    "print": None,
    "print binary": None,
    "chdir": None,
    "fork": None,
    "fork, both answer": None,
    "grandchild": None,
    "grandchild, then hang": "timeout",
    "threads": None,
    "changes the sample": None,
    "breaks imports": None,
}
"""What a sample's reward is counted as; None where it is no failure."""

COSTS_ONE = frozenset({"leak"})
"""What only the second of a rollout's two samples pays for: the first leaves no room for it."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run."""

    behaviour: str
    code: int
    seconds: float
    """Of a rollout's generation and scoring, the middle one of the run."""
    failures: tuple[float, ...]
    """Failed rewards, per rollout."""
    restarts: float
    """Workers replaced in the run."""
    scores: tuple[float, ...]
    """Scores of the samples that met the behaviour, over the run."""
    log_bytes: int
    left: int
    """Processes that outlived the run."""
    message: str
    """The last line that was printed, where the run did not end well."""


def run_with(folder: Path, behaviour: str) -> Outcome:
    """Train with one bad reward and read what was recorded."""
    function = "bad_reward:score_async" if behaviour.startswith("async") else "bad_reward:score"
    config = write_config(
        folder,
        rollout={"num_rollouts": ROLLOUTS},
        reward={"function": function, "timeout": TIMEOUT, "on_error": ON_ERROR, "memory_gb": 1.5, "error_budget": 0.5},
        track={"samples_per_rollout": 16},
    )
    run_dir = folder / "".join(letter if letter.isalnum() else "-" for letter in behaviour)
    os.environ[MARK] = run_dir.name
    os.environ["MILEPOST_ROBUSTNESS_REWARD"] = behaviour
    process = start(config, run_dir)
    try:
        code = process.wait(timeout=180)
    except subprocess.TimeoutExpired:
        process.kill()
        code = process.wait()
    time.sleep(0.1)
    records = _lines(run_dir / "metrics.jsonl")
    rollouts = [record for record in records if record["kind"] == "rollout"]
    times = sorted(record["perf/rollout_time"] for record in records if "perf/rollout_time" in record)
    bad = [line for line in _lines(run_dir / "samples.jsonl") if line["kind"] == "rollout"]
    output = output_of(run_dir).read_text(errors="replace").strip().splitlines() if code else []
    return Outcome(
        behaviour,
        code,
        times[len(times) // 2] if times else float("nan"),
        tuple(record["rollout/reward_failures"] for record in rollouts),
        sum(record["rollout/reward_restarts"] for record in rollouts),
        # Groups of four, in order: the first of the first two.
        tuple(bad[16 * rollout + place]["rewards"]["reward"] for rollout in range(len(bad) // 16) for place in (0, 4)),
        sum(file.stat().st_size for file in (run_dir / "logs").glob("reward-*.log")),
        len(_alive(run_dir.name)),
        output[-1] if output else "",
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _alive(mark: str) -> list[int]:
    """Return the processes that inherited a run's mark, this one not counted."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if int(folder.name) != os.getpid() and wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it has just ended, or belongs to somebody else
            continue
    return found


def misses(outcome: Outcome) -> list[str]:
    """Say what is not as it should be."""
    expected = EXPECTED[outcome.behaviour]
    failures = 0 if expected is None else 1 if outcome.behaviour in COSTS_ONE else BAD_PER_ROLLOUT
    scores = ({0.5} if failures < BAD_PER_ROLLOUT else set()) | ({ON_ERROR} if failures else set())
    found = []
    if outcome.code != 0:
        found.append(f"exit code {outcome.code}: {outcome.message}")
    if outcome.failures != (float(failures),) * ROLLOUTS:
        found.append(f"failures recorded {outcome.failures}, expected {failures} a rollout")
    if set(outcome.scores) != scores:
        found.append(f"scores {sorted(set(outcome.scores))}, expected {sorted(scores)}")
    if outcome.left:
        found.append(f"{outcome.left} processes left")
    return found


def main() -> None:
    """Run all or the named behaviours; print the table."""
    parser = argparse.ArgumentParser(description="Rewards that misbehave: what they cost and what was recorded.")
    parser.add_argument("behaviours", nargs="*", metavar="BEHAVIOUR", help=f"of: {', '.join(EXPECTED)}; default all")
    parser.add_argument("--policy", type=Path, help="folder made by examples/quickstart/make.py; default a tiny one")
    arguments = parser.parse_args()
    if unknown := set(arguments.behaviours) - EXPECTED.keys():
        parser.error(f"no behaviour {', '.join(sorted(unknown))}; there are {', '.join(EXPECTED)}")
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_project(folder, arguments.policy and arguments.policy.resolve())
        (folder / "bad_reward.py").write_text(CODE)
        print(
            f"{ROLLOUTS} rollouts of 16 samples, {BAD_PER_ROLLOUT} of which misbehave; time limit {TIMEOUT:g} s, "
            f"memory limit 1.5 GB, a failed reward is worth {ON_ERROR:g}"
        )
        print(
            f"{'behaviour':22}{'exit':>5}{'s/rollout':>11}{'failures':>10}{'as':>11}{'workers lost':>14}{'score':>7}"
            f"{'log bytes':>11}{'left':>6}"
        )
        for behaviour in arguments.behaviours or EXPECTED:
            outcome = run_with(folder, behaviour)
            found = misses(outcome)
            bad += bool(found)
            score = min(outcome.scores, default=float("nan"))
            print(
                f"{behaviour:22}{outcome.code:>5}{outcome.seconds:>11.2f}{sum(outcome.failures):>10g}"
                f"{EXPECTED[behaviour] or '-':>11}{outcome.restarts:>14g}{score:>7.2g}"
                f"{outcome.log_bytes:>11}{outcome.left:>6}",
                *(f"\n    MISS {miss}" for miss in found),
                flush=True,
            )
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
