from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from milepost.cli.plugins import plugins
from milepost.errors import PluginError

ACME = """
from typing import Annotated, Literal

from pydantic import Field

import milepost
from milepost.components import AlgorithmTraits, RewardTraits

print("chatter from an import")


class Range(milepost.Options):
    low: float = 0.0
    \"\"\"Scores below count as this.\"\"\"


class Options(milepost.Options):
    path: str
    \"\"\"Where the answers
    are.\"\"\"
    scale: Annotated[float, Field(gt=0, le=2)] = 1.0
    \"\"\"What the score is multiplied by.\"\"\"
    mode: Literal["strict", "loose"] = "strict"
    limit: Annotated[int, Field(ge=1)] | None = None
    words: tuple[str, ...] = ()
    range: Range = Range()


@milepost.hookimpl
def milepost_rewards():
    traits = RewardTraits(scope="group")
    return [milepost.Component("acme_reward", Options, traits, lambda options: None, "Scores well.")]


@milepost.hookimpl
def milepost_algorithms():
    traits = AlgorithmTraits(critic=True)
    return [milepost.Component("acme", milepost.NoOptions, traits, lambda options: None, "Learns.")]
"""


def install(site: Path, distribution: str, version: str, name: str, source: str) -> None:
    module = f"{distribution}_{name}"
    (site / f"{module}.py").write_text(textwrap.dedent(source))
    info = site / f"{distribution}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(f"[milepost]\n{name} = {module}\n")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    install(tmp_path, "acme", "1.2", "acme_plugin", ACME)
    install(tmp_path, "bolt", "0.1", "broken_one", "raise RuntimeError('not today')")
    return tmp_path


def milepost(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line as a user does, with the distributions of `site` installed beside milepost."""
    command = [sys.executable, "-c", "from milepost.cli import main; main()", "plugins", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def by_name(done: subprocess.CompletedProcess[str]) -> dict[str, dict[str, Any]]:
    listed: list[dict[str, Any]] = json.loads(done.stdout)["plugins"]
    return {record["name"]: record for record in listed}


def test_list_shows_what_became_of_each_plugin(site: Path) -> None:
    done = milepost(site, "list")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.split("\n\n")[0].splitlines()}
    assert rows["PLUGIN"] == ["PLUGIN", "FROM", "STATE", "PROVIDES"]
    assert rows["acme_plugin"][1:] == ["acme", "1.2", "ok", "algorithm", "acme,", "reward", "acme_reward"]
    assert rows["broken_one"][1:] == ["bolt", "0.1", "broken", "-"]
    assert rows["grpo"][1:] == ["milepost", "0.1.0", "ok", "algorithm", "grpo"]
    assert "broken_one from bolt 0.1 is broken:\n  RuntimeError: not today\n" in done.stdout
    assert done.stderr == "chatter from an import\n"


def test_list_as_json_is_not_disturbed_by_what_plugins_print(site: Path) -> None:
    done = milepost(site, "list", "--json")
    records = by_name(done)
    acme, broken = records["acme_plugin"], records["broken_one"]
    assert (acme["state"], acme["distribution"], acme["version"]) == ("ok", "acme", "1.2")
    assert acme["components"] == [
        {"kind": "algorithm", "name": "acme", "summary": "Learns."},
        {"kind": "reward", "name": "acme_reward", "summary": "Scores well."},
    ]
    assert broken["error"] == "RuntimeError: not today"
    assert "Traceback" in broken["traceback"]
    assert 0 < acme["seconds"] < 30


def test_block_is_honoured_and_a_block_of_nothing_warned_of(site: Path) -> None:
    done = milepost(site, "list", "--json", "--block", "acme:acme_plugin", "--block", "broken_won")
    records = by_name(done)
    assert records["acme_plugin"]["state"] == "blocked"
    assert records["acme_plugin"]["components"] == []
    warning = "blocked plugin 'broken_won' is not installed, so blocking it does nothing; did you mean 'broken_one'?"
    assert json.loads(done.stdout)["warnings"] == [warning]
    assert done.stderr == f"warning: {warning}\n"


def test_a_slow_import_is_pointed_out(tmp_path: Path) -> None:
    install(tmp_path, "slow", "1", "sleepy", "import time; time.sleep(1.05)\n" + ACME)
    done = milepost(tmp_path, "list")
    slow = [line for line in done.stderr.splitlines() if "to import" in line]
    assert len(slow) == 1
    assert slow[0].startswith("warning: plugin sleepy from slow 1 took 1.")
    assert slow[0].endswith(" s to import; what is heavy belongs in the component's build")


def test_show_gives_options_with_type_default_and_meaning(site: Path) -> None:
    done = milepost(site, "show", "acme_reward")
    assert done.returncode == 0, done.stderr
    assert done.stdout == textwrap.dedent(
        """\
        reward acme_reward: Scores well.
          from         plugin acme_plugin, acme 1.2
          scope        group
          needs_label  yes
          options
            path: str (required)
                Where the answers are.
            scale: float (> 0, <= 2) = 1.0
                What the score is multiplied by.
            mode: 'strict' | 'loose' = 'strict'
            limit: int (>= 1) | None = None
            words: tuple[str, ...] = ()
            range: Range = Range(low=0.0)
            range.low: float = 0.0
                Scores below count as this.
        """
    )


def test_show_as_json_carries_the_schema_of_the_options(site: Path) -> None:
    (component,) = json.loads(milepost(site, "show", "acme_reward", "--json").stdout)["components"]
    assert (component["kind"], component["origin"]) == ("reward", "acme 1.2")
    assert component["traits"] == {"scope": "group", "needs_label": "yes"}
    schema = component["options"]
    assert schema["required"] == ["path"]
    assert schema["additionalProperties"] is False
    assert schema["properties"]["scale"]["description"] == "What the score is multiplied by."
    assert schema["$defs"]["Range"]["properties"]["low"]["description"] == "Scores below count as this."


def test_show_takes_the_name_of_a_plugin_for_all_it_provides(site: Path) -> None:
    done = milepost(site, "show", "acme_plugin")
    assert "algorithm acme: Learns." in done.stdout
    assert "  no options\n" in done.stdout
    assert "reward acme_reward: Scores well." in done.stdout


def test_show_of_a_broken_plugin_gives_its_traceback_and_exit_code_2(site: Path) -> None:
    done = milepost(site, "show", "broken_one")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "plugin 'broken_one' from bolt 0.1 is broken" in done.stderr
    assert "RuntimeError: not today" in done.stderr


def test_show_of_an_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(PluginError, match=r"unknown component or plugin 'grpoo'.*did you mean 'grpo'"):
        CliRunner().invoke(plugins, ["show", "grpoo"], catch_exceptions=False)
    with pytest.raises(PluginError, match=r"unknown reward 'grpo'.*'grpo' is the name of an algorithm"):
        CliRunner().invoke(plugins, ["show", "grpo", "--kind", "reward"], catch_exceptions=False)
    with pytest.raises(PluginError, match=r"plugin 'grpo' from milepost 0.1.0 is blocked"):
        CliRunner().invoke(plugins, ["show", "grpo", "--block", "grpo"], catch_exceptions=False)
