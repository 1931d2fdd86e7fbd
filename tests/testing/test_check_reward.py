"""The reward checks: what keeps its promises passes, and every way of breaking one is caught by name."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import pytest
from milepost.components import Component, NoOptions, Options, RewardTraits
from milepost.testing import check_reward
from pydantic import Field

GROUP = RewardTraits(scope="group")
FREE = RewardTraits(needs_label=False)


class Scorer:
    """A reward made from a function of the sample."""

    def __init__(self, function: Any) -> None:
        self.score = function


class Grouped:
    """A group reward made from a function of the samples."""

    def __init__(self, function: Any) -> None:
        self.score_group = function


async def patient(sample: Any) -> dict[str, float]:
    await asyncio.sleep(0)
    return {"reward": float(sample.task.label in sample.text), "length": len(sample.text)}


@pytest.mark.parametrize(
    ("reward", "traits"),
    [
        (Scorer(lambda sample: sample.task.label in sample.text), None),
        (Scorer(patient), None),
        (Scorer(lambda sample: patient(sample)), None),
        (Grouped(lambda samples: [len(sample.text) for sample in samples]), GROUP),
        (Scorer(lambda sample: len(sample.text)), FREE),
    ],
    ids=["sync", "async", "awaitable", "group", "no label"],
)
def test_sound_rewards_pass(reward: Any, traits: RewardTraits | None) -> None:
    assert check_reward(reward, traits=traits) == []


def of_digits(sample: Any) -> float:
    digits = "".join(character for character in sample.text if character.isdecimal())
    return float(digits[:4] or "nan") if len(sample.text) < 1000 and digits else 0.0


def chatty(sample: Any) -> float:
    return 1.0 / len(sample.text)


def slow(sample: Any) -> float:
    if len(sample.text) > 1000:
        time.sleep(5)
    return 0.0


COUNTER = itertools.count()


def annotating(sample: Any) -> float:
    sample.metadata["seen"] = True
    return 0.0


def strict(sample: Any) -> float:
    return float(len(sample.task.label))


SHARED: dict[str, Any] = {}


async def forgetful(sample: Any) -> float:
    """Keeps its sample in a shared place while it waits."""
    SHARED["text"] = sample.text
    await asyncio.sleep(0.01)
    return len(SHARED["text"])


def in_pipe_only(sample: Any) -> float:
    return float(isinstance(sample.task.metadata["range"], tuple))


BROKEN = [
    (Scorer(chatty), {}, "finite score", "an empty response"),
    (Scorer(lambda sample: float("nan")), {}, "finite score", "a right answer"),
    (Scorer(lambda sample: None), {}, "finite score", "a right answer"),
    (Scorer(lambda sample: {"score": 1.0}), {}, "finite score", "a right answer"),
    (Scorer(lambda sample: int(sample.text[:5000].strip("a") or 1)), {}, "finite score", "a right answer"),
    (Scorer(lambda sample: float("9" * len(sample.text))), {}, "finite score", "a megabyte of letters"),
    (Scorer(slow), {"timeout": 0.2}, "finite score", "a megabyte of letters"),
    (Scorer(lambda sample: exit(3)), {}, "finite score", "a right answer"),
    (Scorer(lambda sample: next(COUNTER)), {}, "deterministic", "a right answer, scored again after others"),
    (Scorer(annotating), {}, "samples stay as they were", "a right answer"),
    (Scorer(strict), {"traits": FREE}, "no label", "a right answer"),
    (Scorer(forgetful), {}, "overlapping calls", "3 calls at the same time"),
    (Scorer(in_pipe_only), {"metadata": {"range": (1, 2)}}, "the same in a worker", "a right answer, sent to a worker"),
    (Scorer(lambda sample: 0.0), {"traits": GROUP}, "declared scope", "the traits"),
    (object(), {}, "declared scope", "object"),
    (Grouped(lambda samples: [1.0]), {"traits": GROUP}, "order of a group", "3 samples, and the same in reverse"),
    (
        Grouped(lambda samples: range(len(samples))),
        {"traits": GROUP},
        "order of a group",
        "3 samples, and the same in reverse",
    ),
]


@pytest.mark.parametrize(("reward", "settings", "promise", "case"), BROKEN)
def test_a_broken_promise_is_found(reward: Any, settings: dict[str, Any], promise: str, case: str) -> None:
    found = {(finding.promise, finding.case): finding for finding in check_reward(reward, **settings)}
    assert (promise, case) in found, sorted(found)
    assert found[promise, case].expected and found[promise, case].got


def test_a_reward_built_anew_must_score_the_same() -> None:
    seeds = itertools.count()

    def build(options: Any) -> Scorer:
        seed = next(seeds)
        return Scorer(lambda sample: seed)

    findings = check_reward(Component("lottery", NoOptions, RewardTraits(), build, "Luck."))
    assert {finding.promise for finding in findings} == {"deterministic"}
    assert findings[0].case.endswith("by a reward built anew")


def test_options_must_survive_the_way_to_a_worker() -> None:
    class Local(Options):
        table: dict[Any, Any] = Field(default_factory=lambda: {1: 2})

    component = Component("inf", Local, RewardTraits(), lambda options: Scorer(lambda sample: 0.0), "Unpicklable.")
    assert {finding.promise for finding in check_reward(component)} == {"picklable options", "options as JSON"}


def test_an_author_may_add_texts() -> None:
    reward = Scorer(lambda sample: float("inf") if "FORTY" in sample.text else 0.0)
    assert check_reward(reward) == []
    (finding,) = check_reward(reward, texts=["FORTY-TWO"])
    assert str(finding).startswith("finite score: given text 0: expected a finite score within 10 s, got ")
