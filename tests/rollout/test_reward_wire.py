"""Samples and scores between the controller and a worker."""

from __future__ import annotations

import json
from datetime import date
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from milepost.errors import RunError
from milepost.rollout.rewards.calls import Failure, InvalidRewardError, checked, failure_of, is_asynchronous, scope_of
from milepost.rollout.rewards.wire import (
    ProtocolError,
    decode_answer,
    decode_calls,
    encode_answer,
    encode_calls,
    encode_line,
)
from milepost.samples import Sample, Status, Task


def sample(task: Task, **changes: Any) -> Sample:
    fields: dict[str, Any] = {
        "task": task,
        "tokens": np.array([7, 2**31 - 1, 0], np.int32),
        "trainable": np.array([False, True, True]),
        "log_probs": np.array([np.nan, -0.1, -1e-30], np.float32),
        "versions": np.array([-1, 3, 3], np.int32),
        "status": Status.TRUNCATED,
        "text": "né\ud800\n\x00",
        "group": 4,
        "rollout": 9,
    }
    return Sample(**(fields | changes))


def test_samples_arrive_as_they_were() -> None:
    task = Task(5, "p\u2028q", (1, 2), {"a": [1, None, 0.1]}, {"level": 3})
    sent = [
        sample(task),
        sample(
            task,
            rewards={"reward": 0.1},
            metadata={"n": np.int64(4), "v": np.array([1.5])},
            token_rewards=np.array([0.0, 0.5, np.nan], np.float32),
            extras={"image": object()},
        ),
    ]
    line = encode_calls([(3, sent[:1]), (4, sent)])
    assert line.count(b"\n") == 1
    assert line.count(b"p\\u2028q") == 1, "a shared prompt travels once"
    (first, (one,)), (second, (again, other)) = decode_calls(json.loads(line))
    assert (first, second) == (3, 4)
    for got, was in ((one, sent[0]), (again, sent[0]), (other, sent[1])):
        assert got.task == task
        for name in ("tokens", "trainable", "log_probs", "versions"):
            assert getattr(got, name).dtype == getattr(was, name).dtype
            np.testing.assert_array_equal(getattr(got, name), getattr(was, name))
        assert (got.status, got.text, got.group, got.rollout) == (Status.TRUNCATED, was.text, 4, 9)
        got.tokens[0] = 1  # a reward may write into what it got
    assert (one.rewards, one.metadata, one.token_rewards, one.extras) == ({}, {}, None, {})
    assert (other.rewards, other.metadata, other.extras) == ({"reward": 0.1}, {"n": 4, "v": [1.5]}, {})
    np.testing.assert_array_equal(other.token_rewards, sent[1].token_rewards)


def test_what_is_not_json_is_named() -> None:
    with pytest.raises(RunError, match=r"object is not JSON; .* `reward.placement: inline`"):
        encode_calls([(0, [sample(Task(0, "", ()), metadata={"x": object()})])])


def test_dates_of_a_yaml_file_travel_as_text() -> None:
    assert json.loads(encode_line({"since": date(2026, 11, 30)})) == {"since": "2026-11-30"}


def test_answers_arrive_as_they_were() -> None:
    flight = {7: ["a", "b"]}
    rewards = [{"reward": 0.1 + 0.2, "length": -1.0}, {"reward": 5e-324}]
    assert decode_answer(json.loads(encode_answer(7, rewards, 0.25)), flight) == (7, rewards, 0.25)
    failure = Failure("memory", "a\nb")
    assert decode_answer(json.loads(encode_answer(7, failure, 0.5)), flight) == (7, failure, 0.5)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"call": 8, "seconds": 0.1, "rewards": [{"reward": 1.0}]},
        {"call": True, "seconds": 0.1, "rewards": [{"reward": 1.0}]},
        {"call": 7, "rewards": [{"reward": 1.0}]},
        {"call": 7, "seconds": 0.1, "rewards": []},
        {"call": 7, "seconds": 0.1, "rewards": [{"other": 1.0}]},
        {"call": 7, "seconds": 0.1, "rewards": [{"reward": float("nan")}]},
        {"call": 7, "seconds": 0.1, "rewards": [{"reward": "1"}]},
        {"call": 7, "seconds": 0.1, "rewards": [1.0]},
        {"call": 7, "seconds": 0.1, "kind": "victory", "detail": ""},
        {"call": 7, "seconds": 0.1, "kind": ["timeout"]},
    ],
)
def test_nothing_else_is_taken_for_an_answer(message: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError):
        decode_answer(message, {7: ["a"], 1: ["b"]})


@pytest.mark.parametrize(
    ("answer", "rewards"),
    [
        (1, {"reward": 1.0}),
        (True, {"reward": 1.0}),
        (np.float32(0.5), {"reward": 0.5}),
        (Fraction(1, 4), {"reward": 0.25}),
        ({"reward": 2, "format": False}, {"reward": 2.0, "format": 0.0}),
    ],
)
def test_numbers_of_all_kinds_are_scores(answer: Any, rewards: dict[str, float]) -> None:
    assert checked("sample", answer, 1) == [rewards]
    assert checked("group", (answer, answer), 2) == [rewards, rewards]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "the reward is NoneType None; expected a number"),
        ("1.0", "the reward is str '1.0'; expected a number"),
        (float("nan"), "the reward is nan; expected a finite number"),
        (float("-inf"), "the reward is -inf"),
        (10**400, "expected a finite number"),
        (np.array([1.0, 2.0]), "expected a finite number"),
        ({}, "must have `reward`, the one trained on; given: none"),
        ({"score": 1.0}, "given: score"),
        ({"reward": 1.0, "x": None}, "reward `x` is NoneType None"),
        ({"reward": 1.0, 3: 1.0}, "names of rewards must be strings; given int 3"),
    ],
)
def test_anything_else_is_invalid(answer: Any, message: str) -> None:
    with pytest.raises(InvalidRewardError, match=message):
        checked("sample", answer, 1)


@pytest.mark.parametrize("answer", [1.0, "11", {"reward": 1.0}, [1.0], [1.0, 2.0, 3.0], [1.0, None]])
def test_a_group_reward_returns_one_score_each(answer: Any) -> None:
    with pytest.raises(InvalidRewardError):
        checked("group", answer, 2)


def test_arrays_are_fine_for_a_group() -> None:
    assert checked("group", np.array([1.0, 0.5]), 2) == [{"reward": 1.0}, {"reward": 0.5}]


def test_failures_keep_the_end_of_the_traceback() -> None:
    assert failure_of(MemoryError()).kind == "memory"
    assert failure_of(InvalidRewardError("x")) == Failure("invalid", "x")
    failure = failure_of(KeyError("y" * 20_000))
    assert failure.kind == "exception"
    assert len(failure.detail) == 8000


def test_what_a_reward_is_shows_in_its_methods() -> None:
    class One:
        def score(self, sample: Sample) -> float:
            return 0.0

    class Group(One):
        async def score_group(self, samples: list[Sample]) -> list[float]:
            return []

    assert (scope_of(One()), is_asynchronous(One())) == ("sample", False)
    assert (scope_of(Group()), is_asynchronous(Group())) == ("group", True)
    with pytest.raises(TypeError, match="must have a method `score"):
        scope_of(object())
