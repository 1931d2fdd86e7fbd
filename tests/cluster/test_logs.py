"""Logs of a run's processes."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from milepost.cli import cli
from milepost.cluster.logs import controller_log, find_logs, shown_tail, tail


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "logs"
    for name, count in {"trainer-0": 30, "trainer-1": 1, "controller": 2, "aime/reward-0": 1, "reward-0": 0}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.log").write_text("".join(f"{name} line {i}\n" for i in range(count)))
    return tmp_path / "run"


def test_logs_are_found_by_role_or_process_the_controllers_first(run_dir: Path) -> None:
    def names(role: str | None) -> list[str]:
        return [str(path.relative_to(run_dir / "logs")) for path in find_logs(run_dir, role)]

    everything = ["controller.log", "aime/reward-0.log", "reward-0.log", "trainer-0.log", "trainer-1.log"]
    assert names(None) == everything
    assert names("trainer") == ["trainer-0.log", "trainer-1.log"]
    assert names("trainer-1") == ["trainer-1.log"]
    assert names("reward") == ["aime/reward-0.log", "reward-0.log"]
    assert names("train") == []


def test_the_tail_is_the_last_lines(run_dir: Path) -> None:
    log = run_dir / "logs" / "trainer-0.log"
    assert tail(log) == [f"trainer-0 line {i}" for i in range(10, 30)]
    assert tail(log, 1) == ["trainer-0 line 29"]
    assert tail(run_dir / "none.log") == []
    assert shown_tail(log).startswith(f"log: {log}, the last 20 lines:\n  trainer-0 line 10\n")
    assert shown_tail(run_dir / "logs" / "reward-0.log").endswith("reward-0.log (empty)")


def test_the_command_shows_ends_and_says_what_there_is(run_dir: Path) -> None:
    shown = CliRunner().invoke(cli, ["logs", str(run_dir), "trainer", "-n", "1"])
    assert shown.output == ("==> trainer-0.log <==\ntrainer-0 line 29\n==> trainer-1.log <==\ntrainer-1 line 0\n")
    missing = CliRunner().invoke(cli, ["logs", str(run_dir), "engine"])
    assert missing.exit_code == 2
    assert "there are aime/reward-0, controller, reward-0, trainer-0, trainer-1" in missing.stderr
    assert "a run writes them when it starts" in CliRunner().invoke(cli, ["logs", str(run_dir / "no")]).stderr


def test_following_shows_what_is_appended(run_dir: Path) -> None:
    command = [sys.executable, "-u", "-m", "milepost", "logs", str(run_dir), "trainer", "-n", "1", "-f"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline() for _ in range(4)][-1] == "trainer-1 line 0\n"
    time.sleep(0.5)  # the files are opened for following
    with (run_dir / "logs" / "trainer-1.log").open("a") as log:
        log.write("half a ")
        log.flush()
        time.sleep(0.5)
        log.write("line\n")
    assert process.stdout.readline() == "[trainer-1] half a line\n"
    process.kill()
    process.wait()


def test_the_controllers_log_has_what_is_printed_but_progress_bars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="the end"), controller_log(tmp_path):
        print("to stdout")
        click.echo("to stderr", err=True)
        print("\rbar 10%", end="", file=sys.stderr)
        raise ValueError("the end")
    print("afterwards")
    lines = (tmp_path / "logs" / "controller.log").read_text().splitlines()
    assert lines[0].startswith("--- ") and lines[1:3] == ["to stdout", "to stderr"]
    assert lines[-1] == "ValueError: the end"
    captured = capsys.readouterr()
    assert captured.out == "to stdout\nafterwards\n"
    assert captured.err == "to stderr\n\rbar 10%"
