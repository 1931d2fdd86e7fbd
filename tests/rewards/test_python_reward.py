"""The reward that is a plain function."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from milepost.errors import PluginError
from milepost_python import PythonOptions
from milepost_python.function import load_function, make_reward
from pydantic import ValidationError

CODE = """
LIMIT = 3

def size(sample):
    return len(sample)

async def late(sample):
    return 2.0

def ranks(samples):
    return list(range(len(samples)))

class Judge:
    @staticmethod
    def score(sample):
        return 5.0

class Later:
    async def __call__(self, samples):
        return [7.0 for _ in samples]

later = Later()
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_reward_functions.py").write_text(CODE)
    (tmp_path / "own_reward_broken.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "own_reward_functions"
    for name in ("own_reward_functions", "own_reward_broken"):
        sys.modules.pop(name, None)


def test_functions_become_rewards(module: str) -> None:
    assert make_reward(f"{module}:size", "sample").score("abc") == 3
    assert make_reward(f"{module}:Judge.score", "sample").score("abc") == 5.0
    assert make_reward(f"{module}:ranks", "group").score_group("abc") == [0, 1, 2]


def test_async_functions_become_async_rewards(module: str) -> None:
    one: Any = make_reward(f"{module}:late", "sample")
    group: Any = make_reward(f"{module}:later", "group")
    assert asyncio.iscoroutinefunction(one.score)
    assert asyncio.iscoroutinefunction(group.score_group)
    assert asyncio.run(one.score("abc")) == 2.0
    assert asyncio.run(group.score_group("ab")) == [7.0, 7.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_rewards:score", "no module 'no_such_rewards'; put it beside the run config"),
        ("own_reward_functions.deeper:score", "no module 'own_reward_functions.deeper'"),
        ("own_reward_functions:scor", "has no 'scor'; it has .*size"),
        ("own_reward_functions:Judge.scores", "own_reward_functions.Judge has no 'scores'"),
        ("own_reward_functions:LIMIT", "is a int, not a function"),
    ],
)
def test_what_cannot_be_loaded_is_named(module: str, spec: str, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        load_function(spec)


def test_a_missing_import_inside_the_module_is_not_blamed_on_the_run_config(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
        load_function("own_reward_broken:score")


@pytest.mark.parametrize("spec", ["score", "module:", ":score", "a b:c", "module:f()"])
def test_a_function_is_named_module_colon_function(spec: str) -> None:
    with pytest.raises(ValidationError):
        PythonOptions(function=spec)
