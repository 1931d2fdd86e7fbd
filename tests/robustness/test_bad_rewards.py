"""A run whose rewards misbehave goes on, and records it; a small share of what scripts/robustness/rewards.py checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "robustness" / "rewards.py"


def test_runs_survive_their_rewards(policy: Path) -> None:
    behaviours = ["deaf", "os._exit", "leak", "grandchild", "threads"]
    command = [sys.executable, str(SCRIPT), "--policy", str(policy), *behaviours]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {line[:22].strip(): line[22:].split() for line in done.stdout.splitlines()[2:]}
    assert list(rows) == behaviours
    # exit code, failures, their kind, workers lost, processes left
    assert {name: (row[0], row[2], row[3], row[4], row[7]) for name, row in rows.items()} == {
        "deaf": ("0", "6", "timeout", "6", "0"),
        "os._exit": ("0", "6", "crash", "6", "0"),
        "leak": ("0", "3", "memory", "3", "0"),
        "grandchild": ("0", "0", "-", "0", "0"),
        "threads": ("0", "0", "-", "0", "0"),
    }
