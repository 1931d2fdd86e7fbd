"""A run whose rewards misbehave goes on, and records it; a small share of what scripts/robustness/rewards.py checks."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest
from commands import Command

SCRIPTS = Path(__file__).parents[2] / "scripts" / "robustness"
pytestmark = pytest.mark.takes(30)


class Started(Command):
    """As much of a `subprocess.Popen` as the script asks of its runs."""

    def wait(self, timeout: float | None = None) -> int:
        return self.finish(timeout=240)[0]


def start(config: Path, run_dir: Path) -> Started:
    return Started("train", config, "--no-progress", "--run-dir", run_dir, cwd=config.parent)


def test_runs_survive_their_rewards(
    policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = import_module("rewards")
    monkeypatch.setattr(script, "start", start)
    for name in (script.MARK, "MILEPOST_ROBUSTNESS_REWARD"):
        monkeypatch.setenv(name, "")  # so that it is gone afterwards
    behaviours = ["deaf", "os._exit", "leak", "grandchild", "threads"]
    monkeypatch.setattr(sys, "argv", ["rewards.py", "--policy", str(policy), *behaviours])
    with pytest.raises(SystemExit) as end:
        script.main()
    printed = capsys.readouterr().out
    assert end.value.code == 0, printed
    rows = {line[:22].strip(): line[22:].split() for line in printed.splitlines()[2:]}
    assert list(rows) == behaviours
    # exit code, failures, their kind, workers lost, processes left
    assert {name: (row[0], row[2], row[3], row[4], row[7]) for name, row in rows.items()} == {
        "deaf": ("0", "6", "timeout", "6", "0"),
        "os._exit": ("0", "6", "crash", "6", "0"),
        "leak": ("0", "3", "memory", "3", "0"),
        "grandchild": ("0", "0", "-", "0", "0"),
        "threads": ("0", "0", "-", "0", "0"),
    }
