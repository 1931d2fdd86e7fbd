"""How a reward is called, and what it may answer; the same in a worker process and inline."""

from __future__ import annotations

import inspect
import math
import traceback
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

from milepost.samples import Sample

FailureKind = Literal["timeout", "crash", "memory", "exception", "invalid"]
FAILURE_KINDS: tuple[FailureKind, ...] = ("timeout", "crash", "memory", "exception", "invalid")
Scope = Literal["sample", "group"]

DETAIL_LIMIT = 8000
"""Characters of a traceback that are kept; its end is what names the error."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a reward gave no score."""

    kind: FailureKind
    """`timeout`: killed at the time limit. `crash`: its process ended. `memory`: over the memory limit. `exception`: it
    raised. `invalid`: it returned something that is not a finite score."""
    detail: str
    """Traceback, stack or exit status."""


Rewards = dict[str, float]
"""Named rewards of one sample; `reward` is the one trained on."""


class InvalidRewardError(ValueError):
    """A reward returned something that is not a score."""


def scope_of(reward: Any) -> Scope:
    """Return how `reward` wants to be called: a group at once if it has `score_group`, else sample by sample.

    Raises TypeError if it has neither method.
    """
    if callable(getattr(reward, "score_group", None)):
        return "group"
    if callable(getattr(reward, "score", None)):
        return "sample"
    raise TypeError(
        f"a reward must have a method `score(sample)` or `score_group(samples)`; {type(reward).__name__} has neither"
    )


def is_asynchronous(reward: Any) -> bool:
    """Return whether the method of `reward` is an `async def`, so that several calls may overlap."""
    return inspect.iscoroutinefunction(reward.score_group if scope_of(reward) == "group" else reward.score)


def call_reward(reward: Any, scope: Scope, samples: Sequence[Sample]) -> Any | Awaitable[Any]:
    """Call `reward` on one sample (scope `sample`, one entry) or one group; the answer is unchecked."""
    if scope == "group":
        return reward.score_group(samples)
    (sample,) = samples
    return reward.score(sample)


def checked(scope: Scope, answer: Any, count: int) -> list[Rewards]:
    """Return the named rewards of each of `count` samples from what a reward returned.

    Raises InvalidRewardError if it is not a finite number or a mapping of names to such (with `reward` among them);
    for scope `group`, if it is not a sequence of `count` such answers.
    """
    if scope == "sample":
        return [_rewards(answer)]
    if isinstance(answer, str | bytes | Mapping) or not isinstance(answer, Iterable):
        raise InvalidRewardError(f"score_group returned {_shown(answer)}; expected a sequence of {count} scores")
    scores = list(answer)
    if len(scores) != count:
        raise InvalidRewardError(f"score_group returned {len(scores)} scores for a group of {count}")
    return [_rewards(score) for score in scores]


def failure_of(error: BaseException) -> Failure:
    """Return the failure that an exception raised by a reward amounts to."""
    kind: FailureKind = "exception"
    if isinstance(error, MemoryError):
        kind = "memory"
    elif isinstance(error, InvalidRewardError):
        return Failure("invalid", str(error))
    return Failure(kind, "".join(traceback.format_exception(error))[-DETAIL_LIMIT:])


def _rewards(answer: Any) -> Rewards:
    if not isinstance(answer, Mapping):
        return {"reward": _number(answer, "the reward")}
    if "reward" not in answer:
        names = ", ".join(sorted(map(str, answer))) or "none"
        raise InvalidRewardError(f"a mapping of rewards must have `reward`, the one trained on; given: {names}")
    rewards: Rewards = {}
    for name, value in answer.items():
        if not isinstance(name, str):
            raise InvalidRewardError(f"names of rewards must be strings; given {_shown(name)}")
        rewards[name] = _number(value, f"reward `{name}`")
    return rewards


def _number(value: Any, what: str) -> float:
    if not isinstance(value, SupportsFloat):
        raise InvalidRewardError(f"{what} is {_shown(value)}; expected a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRewardError(f"{what} is {_shown(value)}; expected a finite number ({error})") from error
    if not math.isfinite(number):
        raise InvalidRewardError(f"{what} is {number}; expected a finite number")
    return number


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"
