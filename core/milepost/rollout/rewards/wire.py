"""Samples and scores as lines of JSON, between the controller and its reward workers.

Nothing is ever unpickled: a worker runs other people's code, and what it sends is parsed as JSON and checked. Per-token
arrays travel as base64 of their little-endian bytes, prompts once per message however many samples share them.
"""

from __future__ import annotations

import binascii
import json
import math
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from milepost.errors import RunError
from milepost.rollout.rewards.calls import DETAIL_LIMIT, FAILURE_KINDS, Failure, FailureKind, Rewards
from milepost.samples import Sample, Status, Task

Message = dict[str, Any]
Answer = list[Rewards] | Failure
"""What came of one call: the rewards of its samples, or why there are none."""


class ProtocolError(ValueError):
    """A worker sent something that is not an answer."""


def encode_line(message: Message) -> bytes:
    """Return a message as one line of JSON."""
    return json.dumps(message, separators=(",", ":"), default=_plain).encode() + b"\n"


def encode_calls(calls: Sequence[tuple[int, Sequence[Sample]]]) -> bytes:
    """Return the line that asks a worker for these calls, each an id and its samples (one, or a group).

    Raises RunError if a label or metadata cannot be written as JSON.
    """
    tasks: dict[int, tuple[int, Task]] = {}
    for _, samples in calls:
        for sample in samples:
            tasks.setdefault(id(sample.task), (len(tasks), sample.task))
    try:
        return encode_line(
            {
                "tasks": [_task_out(task) for _, task in tasks.values()],
                "calls": [
                    [number, [_sample_out(sample, tasks[id(sample.task)][0]) for sample in samples]]
                    for number, samples in calls
                ],
            }
        )
    except (TypeError, ValueError, RecursionError) as error:
        raise RunError(
            f"a sample cannot be sent to a reward worker: {error}; labels and metadata must be JSON (numbers, strings, "
            "lists, mappings), or set `reward.placement: inline`"
        ) from error


def decode_calls(message: Message) -> list[tuple[int, list[Sample]]]:
    """Return the calls of a line written by `encode_calls`. `extras` stay behind: they are empty."""
    tasks = [_task_in(task) for task in message["tasks"]]
    return [(number, [_sample_in(sample, tasks) for sample in samples]) for number, samples in message["calls"]]


def encode_answer(number: int, answer: Answer, seconds: float) -> bytes:
    """Return the line that answers call `number`, which took `seconds`."""
    if isinstance(answer, Failure):
        return encode_line({"call": number, "seconds": seconds, "kind": answer.kind, "detail": answer.detail})
    return encode_line({"call": number, "seconds": seconds, "rewards": answer})


def decode_answer(message: Message, flight: Mapping[int, Sequence[Any]]) -> tuple[int, Answer, float]:
    """Return call number, answer and seconds of a worker's line, trusting nothing in it.

    `flight` has the samples of each call the worker was asked for. Raises ProtocolError if the line is not
    an answer to one of them.
    """
    number, seconds = message.get("call"), message.get("seconds")
    if type(number) is not int or number not in flight or not isinstance(seconds, float):
        raise ProtocolError(f"not an answer to a call: {str(message)[:200]}")
    kind, rewards = message.get("kind"), message.get("rewards")
    if kind in FAILURE_KINDS:
        return number, Failure(cast(FailureKind, kind), str(message.get("detail", ""))[-DETAIL_LIMIT:]), seconds
    well_formed = (
        isinstance(rewards, list)
        and len(rewards) == len(flight[number])
        and all(isinstance(one, dict) and "reward" in one and all(map(_finite, one.values())) for one in rewards)
    )
    if not well_formed:
        raise ProtocolError(f"not the rewards of {len(flight[number])} samples: {str(rewards)[:200]}")
    return number, cast(list[Rewards], rewards), seconds


def _finite(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool) and math.isfinite(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, date):
        # YAML reads dates by itself; an options model takes them back from text.
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _pack(array: NDArray[Any], dtype: str) -> str:
    return binascii.b2a_base64(np.ascontiguousarray(array, dtype).tobytes(), newline=False).decode("ascii")


def _unpack(text: str, dtype: str) -> NDArray[Any]:
    # A copy, since rewards may write into what frombuffer would make read-only.
    return np.frombuffer(binascii.a2b_base64(text), dtype).copy()


def _task_out(task: Task) -> list[Any]:
    return [task.index, task.prompt, list(task.tokens), task.label, dict(task.metadata)]


def _task_in(fields: list[Any]) -> Task:
    index, prompt, tokens, label, metadata = fields
    return Task(index=index, prompt=prompt, tokens=tuple(tokens), label=label, metadata=metadata)


def _sample_out(sample: Sample, task: int) -> Message:
    out: Message = {
        "task": task,
        "tokens": _pack(sample.tokens, "<i4"),
        "trainable": _pack(sample.trainable, "?"),
        "log_probs": _pack(sample.log_probs, "<f4"),
        "versions": _pack(sample.versions, "<i4"),
        "status": sample.status.value,
        "text": sample.text,
        "group": sample.group,
        "rollout": sample.rollout,
    }
    if sample.rewards:
        out["rewards"] = sample.rewards
    if sample.metadata:
        out["metadata"] = sample.metadata
    if sample.token_rewards is not None:
        out["token_rewards"] = _pack(sample.token_rewards, "<f4")
    return out


def _sample_in(fields: Message, tasks: Sequence[Task]) -> Sample:
    token_rewards = fields.get("token_rewards")
    return Sample(
        task=tasks[fields["task"]],
        tokens=_unpack(fields["tokens"], "<i4"),
        trainable=_unpack(fields["trainable"], "?"),
        log_probs=_unpack(fields["log_probs"], "<f4"),
        versions=_unpack(fields["versions"], "<i4"),
        status=Status(fields["status"]),
        text=fields["text"],
        group=fields["group"],
        rollout=fields["rollout"],
        rewards=fields.get("rewards", {}),
        metadata=fields.get("metadata", {}),
        token_rewards=None if token_rewards is None else _unpack(token_rewards, "<f4"),
    )
