"""`kill -9` at random moments leaves nothing missing or doubled; a small share of scripts/robustness/kills.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.takes(30)
SCRIPT = Path(__file__).parents[2] / "scripts" / "robustness" / "kills.py"


def test_a_run_killed_in_a_save_and_in_a_step_equals_an_undisturbed_one(policy: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--policy", str(policy), "--kills", "2", "--rollouts", "50"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kills, " in done.stdout
    assert "the resumed run equals bit for bit the undisturbed one" in done.stdout
