"""`milepost plugins check` as a user runs it: on a name, a folder, a module; its text, its JSON, its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SHOUTING = """
    import milepost
    from milepost.components import RewardTraits

    class Options(milepost.Options):
        least: int = 0

    class Shouting:
        def __init__(self, least):
            self.least = least

        def score(self, sample):
            assert sample.task.metadata.get("loud", True)
            return sum(c.isupper() for c in sample.text) / max(len(sample.text), self.least)

    @milepost.hookimpl
    def milepost_rewards():
        build = lambda options: Shouting(options.least)
        return [milepost.Component("shouting", Options, RewardTraits(), build, "The share of capitals.")]
"""


def check(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from milepost.cli import main; main()", "plugins", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env={**os.environ})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "shouting.py").write_text(textwrap.dedent(SHOUTING))
    return tmp_path


def test_a_finding_says_which_promise_on_what_input_expected_and_got(folder: Path) -> None:
    done = check(folder, "shouting.py")
    assert done.returncode == 1
    plugin, reward, *finding, last = done.stdout.splitlines()
    assert plugin.startswith("plugin shouting from local:shouting.py (") and plugin.endswith("): ok")
    assert reward.startswith("reward shouting from local:shouting.py (") and reward.endswith("): 1 broken")
    assert finding == [
        "  finite score",
        "    case:     an empty response",
        "    expected: a finite score within 10 s",
        "    got:      ZeroDivisionError: division by zero",
    ]
    assert last == "1 promise broken"


def test_options_label_and_metadata_reach_the_component(folder: Path) -> None:
    assert check(folder, "./shouting.py", "--set", "least=1").returncode == 0
    silent = check(folder, "./shouting.py", "--set", "least=1", "--metadata", "{loud: false}", "--json")
    assert silent.returncode == 1
    data = json.loads(silent.stdout)
    assert data["ok"] is False
    plugin, reward = data["reports"]
    assert (plugin["what"], plugin["findings"], reward["what"]) == ("plugin shouting", [], "reward shouting")
    assert reward["findings"][0] == {
        "promise": "finite score",
        "case": "a right answer",
        "expected": "a finite score within 10 s",
        "got": "AssertionError: ",
    }
    label = check(folder, "math", "--label", "'<nothing>'")
    assert label.returncode in (0, 1)
    assert "reward math from milepost" in label.stdout


def test_an_installed_component_is_checked_by_name(folder: Path) -> None:
    done = check(folder, "grpo")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "every promise is kept")
    assert "algorithm grpo from milepost" in done.stdout
    clipped = check(folder, "grpo", "--set", "eps_clip=0.1", "--set", "dual_clip=3.0", "--json")
    assert json.loads(clipped.stdout)["ok"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["grpoo"], "unknown component or plugin 'grpoo'"),
        (["python"], "options of reward python from milepost 0.1.0 are wrong; give them with --set KEY=VALUE"),
        (["grpo", "--set", "eps_clip"], "'eps_clip' is not KEY=VALUE"),
        (["grpo", "--metadata", "7"], "'7' is not a mapping"),
        (["./nothing"], "is no plugin; expected a folder with a pyproject.toml, a module NAME.py or a package"),
    ],
)
def test_what_cannot_be_checked_says_why(folder: Path, arguments: list[str], message: str) -> None:
    done = check(folder, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_without_an_entry_point_says_what_is_missing(folder: Path) -> None:
    (folder / "pyproject.toml").write_text('[project]\nname = "acme"\n')
    done = check(folder, ".")
    assert done.returncode == 2
    assert "names no plugin; expected a name and a table [project.entry-points.milepost]" in done.stderr


def test_a_broken_and_a_heavy_plugin_are_findings(folder: Path) -> None:
    (folder / "broken.py").write_text("raise RuntimeError('not today')\n")
    done = check(folder, "broken.py")
    assert done.returncode == 1
    assert "  loads\n" in done.stdout and "RuntimeError: not today" in done.stdout
    (folder / "heavy.py").write_text("import numpy\n" + textwrap.dedent(SHOUTING).replace('"shouting"', '"heavy"'))
    done = check(folder, "heavy.py", "--set", "least=1")
    assert done.returncode == 1
    assert "  light import\n" in done.stdout
    assert "imports numpy; what is heavy belongs in the component's build" in done.stdout
