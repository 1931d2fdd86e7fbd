"""What hostile and careless plugins do to the command line: nothing. Real distributions, the real commands.

One row of HOSTILE is one row of the table in docs/plugins/hostile.md; a test holds the two together.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from plugin_site import Site, reward

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Hostile:
    """One plugin, what becomes of it, and what `milepost plugins list` prints."""

    what: str
    """As the guide's table names it."""
    source: str
    state: str
    says: str
    """Printed by `plugins list`, on either stream."""
    arguments: tuple[str, ...] = ()


def options_model(model: str) -> str:
    return reward("hostile").replace('Component("hostile", Options,', f'Component("hostile", {model},')


HOSTILE = [
    Hostile("import error", "import no_such_module", "broken", "ModuleNotFoundError: No module named 'no_such_module'"),
    Hostile("syntax error", "def broken(:", "broken", "SyntaxError: invalid syntax"),
    Hostile(
        "misspelt hook",
        reward("hostile").replace("def milepost_rewards", "def milepost_reward"),
        "broken",
        "unknown hook 'milepost_reward'",
    ),
    Hostile(
        "hook without its decorator",
        reward("hostile").replace("@milepost.hookimpl", ""),
        "broken",
        "milepost_rewards is not marked as a hook; put @milepost.hookimpl above it",
    ),
    Hostile(
        "no hook at all",
        "value = 1",
        "broken",
        "implements no hook; expected at least one of milepost_algorithms",
    ),
    Hostile(
        "hook that raises",
        "import milepost\n\n@milepost.hookimpl\ndef milepost_rewards():\n    raise RuntimeError('not today')\n",
        "broken",
        "RuntimeError: not today",
    ),
    Hostile(
        "wrong return type",
        "import milepost\n\n@milepost.hookimpl\ndef milepost_rewards():\n    return 'hostile'\n",
        "broken",
        "milepost_rewards() returned 'hostile' (str); expected an iterable of milepost.Component records",
    ),
    Hostile(
        "hook wrapper",
        "import pluggy\n\n@pluggy.HookimplMarker('milepost')(wrapper=True)\n"
        "def milepost_rewards():\n    return (yield)\n",
        "broken",
        "milepost_rewards is a hook wrapper; a plugin may only add components",
    ),
    Hostile(
        "options model that is not one",
        options_model("dict"),
        "broken",
        "options are the class dict; expected a pydantic model class",
    ),
    Hostile(
        "option that is the kernel's",
        reward("hostile").replace("scale: float", "timeout: float").replace("options.scale", "options.timeout"),
        "broken",
        "option 'timeout' of Options is a key of the kernel's own",
    ),
    Hostile("import that prints", 'print("chatter")\n' + textwrap.dedent(reward("hostile")), "ok", "chatter"),
    Hostile("import that calls sys.exit", "import sys\nsys.exit(0)", "broken", "SystemExit: 0"),
    Hostile(
        "import that takes ten minutes",
        "import time\ntime.sleep(600)\n" + textwrap.dedent(reward("hostile")),
        "broken",
        "its import took longer than 2 s and was stopped",
        ("--import-limit", "2"),
    ),
    Hostile(
        "import that takes ten minutes, and survives any exception",
        "import time\ntry:\n    time.sleep(600)\nexcept Exception:\n    pass\n" + textwrap.dedent(reward("hostile")),
        "broken",
        "its import took longer than 2 s and was stopped",
        ("--import-limit", "2"),
    ),
    Hostile(
        "slow import",
        "import time\ntime.sleep(1.2)\n" + textwrap.dedent(reward("hostile")),
        "ok",
        "s to import; what is heavy belongs in the component's build",
    ),
    Hostile(
        "heavy import at entry",
        "import numpy\n" + textwrap.dedent(reward("hostile")),
        "ok",
        "plugin hostile from hostile-plugins 1.0 imports numpy; what is heavy belongs in the component's build",
    ),
    Hostile(
        "shadowing a built-in",
        reward("deepscaler"),
        "conflicting",
        "Block the other to choose: --block hostile-plugins:hostile or --block milepost:deepscaler",
    ),
]


def milepost(site: Path, *arguments: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line with the distributions of `site` installed beside milepost."""
    words = [sys.executable, "-c", "from milepost.cli import main; main()", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(words, capture_output=True, text=True, check=False, env=environment, cwd=cwd, timeout=120)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    folder = tmp_path / "site"
    folder.mkdir()
    made = Site(folder)
    made.install("good-plugins", {"good": reward("good")})
    return made


def listed(site: Site, *arguments: str) -> dict[str, dict[str, Any]]:
    done = milepost(site.folder, "plugins", "list", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    return {f"{one['distribution']}:{one['name']}": one for one in json.loads(done.stdout)["plugins"]}


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.what)
def test_a_hostile_plugin_is_told_and_the_rest_works(hostile: Hostile, site: Site) -> None:
    site.install("hostile-plugins", {"hostile": hostile.source})
    done = milepost(site.folder, "plugins", "list", *hostile.arguments)
    assert done.returncode == 0, done.stderr
    rows = {tuple(line.split()[:2]): line.split() for line in done.stdout.split("\n\n")[0].splitlines()}
    assert rows["hostile", "hostile-plugins"][3] == hostile.state
    assert rows["good", "good-plugins"][3:] == ["ok", "reward", "good"]
    assert rows["grpo", "milepost"][3:] == ["ok", "algorithm", "grpo"]
    said = " ".join((done.stdout + done.stderr).split())
    assert hostile.says in said
    # The rest also works where it is used, and standard output stays ours.
    shown = milepost(site.folder, "plugins", "show", "good", "--json", *hostile.arguments)
    assert [one["name"] for one in json.loads(shown.stdout)["components"]] == ["good"]


def test_two_distributions_of_one_name_set_both_aside_until_one_is_blocked(site: Site) -> None:
    site.install("first-plugins", {"same": reward("same")})
    site.install("second-plugins", {"same": reward("same")})
    records = listed(site)
    assert records["first-plugins:same"]["state"] == records["second-plugins:same"]["state"] == "conflicting"
    refused = milepost(site.folder, "plugins", "show", "same", "--kind", "reward")
    assert refused.returncode == 2
    assert "first-plugins 1.0" in refused.stderr and "second-plugins 1.0" in refused.stderr
    records = listed(site, "--block", "second-plugins:same")
    assert records["first-plugins:same"]["state"] == "ok"
    assert records["second-plugins:same"]["state"] == "blocked"


def test_a_run_is_refused_and_nothing_stands_in(site: Site, write_config: Callable[..., Path]) -> None:
    """Selecting a shadowed built-in, or a broken plugin, ends `train` with the reason; blocking makes the choice."""
    site.install("hostile-plugins", {"deepscaler": reward("deepscaler"), "crash": "raise RuntimeError('not today')"})
    config = write_config()
    text = config.read_text().replace("  function: score:score\n", "")

    config.write_text(text.replace("name: python", "name: deepscaler"))
    refused = milepost(site.folder, "plan", config)
    assert refused.returncode == 2
    assert "reward 'deepscaler' is provided by" in refused.stderr and "neither is used" in refused.stderr
    chosen = milepost(site.folder, "plan", config, "--block", "hostile-plugins:deepscaler", "--json")
    assert chosen.returncode == 0, chosen.stderr
    assert json.loads(chosen.stdout)["config"]["reward"]["require_think"] is True

    config.write_text(text.replace("name: python", "name: crash"))
    refused = milepost(site.folder, "train", config)
    assert refused.returncode == 2
    assert (
        "reward.name: reward 'crash' cannot be had: plugin 'crash' from hostile-plugins 1.0 did not load"
        in refused.stderr
    )
    assert "RuntimeError: not today" in refused.stderr
    assert not (config.parent / "run").exists()


def test_the_guides_table_has_every_case_and_what_it_prints() -> None:
    page = (ROOT / "docs" / "plugins" / "hostile.md").read_text()
    rows = re.findall(r"^\| ([^|`]+?) \| (\w+) \| `(.+?)` \|$", page, re.MULTILINE)
    assert rows == [(case.what, case.state, case.says) for case in HOSTILE]
