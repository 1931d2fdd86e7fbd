"""Groups, rounds, filters and keys of a rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import numpy as np
import pytest
from milepost.errors import RunError
from milepost.rollout.engine import Engine, SamplingParams
from milepost.rollout.evaluation import evaluation_metrics
from milepost.rollout.generation import (
    Rollout,
    RolloutGenerator,
    TaskEngine,
    all_of,
    rollout_metrics,
    zero_variance,
)
from milepost.samples import Sample, Status, Task

PARAMS = SamplingParams(max_new_tokens=4)


def sample(
    rewards: float | None = None,
    *,
    group: int = 0,
    num: int = 2,
    status: Status = Status.COMPLETED,
    log_prob: float = -1.0,
) -> Sample:
    """Make a sample of one prompt token and `num` sampled ones."""
    return Sample(
        task=Task(0, "p", (1,)),
        tokens=np.arange(1 + num, dtype=np.int32),
        trainable=np.array([False] + [True] * num),
        log_probs=np.array([np.nan] + [log_prob] * num, np.float32),
        versions=np.array([-1] + [0] * num, np.int32),
        status=status,
        group=group,
        rewards={} if rewards is None else {"reward": rewards},
    )


class Recorder:
    """An engine that notes the key of each request; sampling itself is another test's matter."""

    def __init__(self) -> None:
        self.keys: list[tuple[int, ...]] = []

    async def generate(self, task: Task, tokens: Sequence[int], params: SamplingParams, key: Sequence[int]) -> Sample:
        self.keys.append(tuple(key))
        return sample()


class TaskReward:
    """Rewards a sample by a table: task index to the rewards of its group."""

    def __init__(self, table: dict[int, list[float]]) -> None:
        self.table = table

    def begin(self, expected: int) -> None:
        pass

    async def score(self, samples: Sequence[Sample]) -> None:
        for one, reward in zip(samples, self.table[samples[0].metadata["task"]], strict=True):
            one.rewards["reward"] = reward


async def marked(task: Task, engine: TaskEngine) -> list[Sample]:
    """Generate one sample that remembers its task."""
    one = await engine.generate()
    one.metadata["task"] = task.index
    return [one]


def generator(table: dict[int, list[float]], recorder: Recorder, **options: object) -> RolloutGenerator:
    tasks = iter([Task(i, str(i), (1,)) for i in table])
    return RolloutGenerator(
        engine=cast("Engine", recorder),
        scorer=TaskReward(table),
        next_tasks=lambda count: [next(tasks) for _ in range(count)],
        params=PARAMS,
        seed=7,
        batch_size=2,
        samples_per_prompt=2,
        generate=marked,
        **options,  # type: ignore[arg-type]
    )


def test_samples_of_a_group_share_its_id_and_every_request_has_a_key_of_its_own() -> None:
    recorder = Recorder()
    rollout = asyncio.run(generator({0: [1, 0], 1: [0, 0]}, recorder)(3))
    assert [one.group for one in rollout.samples] == [0, 0, 1, 1]
    assert [one.rollout for one in rollout.samples] == [0, 1, 2, 3]
    assert [one.reward for one in rollout.samples] == [1, 0, 0, 0]
    # seed, training, rollout, group, sample, call
    assert sorted(recorder.keys) == [(7, 0, 3, 0, 0, 1), (7, 0, 3, 0, 1, 1), (7, 0, 3, 1, 0, 1), (7, 0, 3, 1, 1, 1)]


def test_a_filter_makes_up_for_what_it_drops_and_keeps_the_order() -> None:
    recorder = Recorder()
    table = {0: [0.0, 0.0], 1: [1.0, 0.0], 2: [1.0, 1.0], 3: [0.0, 1.0]}
    rollout = asyncio.run(generator(table, recorder, drop=zero_variance, max_rounds=3)(0))
    assert [one.metadata["task"] for one in rollout.samples] == [1, 1, 3, 3]
    assert rollout.num_generated == 4
    assert rollout.dropped == {"all 2 rewards are 0": 1, "all 2 rewards are 1": 1}
    assert len(set(recorder.keys)) == 8


def test_a_filter_that_drops_everything_stops_with_the_reasons() -> None:
    table = {i: [0.0, 0.0] for i in range(4)}
    with pytest.raises(RunError, match=r"0 of 2 groups passed the filter in 2 rounds.*all 2 rewards are 0': 4"):
        asyncio.run(generator(table, Recorder(), drop=zero_variance, max_rounds=2)(0))


def test_zero_variance_keeps_a_group_of_one() -> None:
    assert zero_variance([sample(0.0)] * 4) == "all 4 rewards are 0"
    assert zero_variance([sample(1.0), sample(0.0)]) is None
    assert zero_variance([sample(0.0)]) is None


def test_fan_out_shares_a_rollout_id_and_an_empty_rollout_is_an_error() -> None:
    async def two(task: Task, engine: TaskEngine) -> list[Sample]:
        return [*await marked(task, engine), *await marked(task, engine)]

    async def none(task: Task, engine: TaskEngine) -> list[Sample]:
        return []

    recorder = Recorder()
    fan_out = generator({0: [1, 1, 0, 0], 1: [0, 0, 0, 0]}, recorder)
    fan_out.generate = two
    assert [one.rollout for one in asyncio.run(fan_out(0)).samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert len(set(recorder.keys)) == 8
    fan_out = generator({0: [], 1: []}, Recorder())
    fan_out.generate = none
    with pytest.raises(RunError, match="returned no sample"):
        asyncio.run(fan_out(0))


def test_the_first_failure_is_raised_itself_and_the_rest_is_cancelled() -> None:
    cancelled = []

    async def fails() -> None:
        raise KeyError("lost")

    async def waits() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(KeyError, match="lost"):
        asyncio.run(all_of([waits(), fails()]))
    assert cancelled == [True]


def test_rollout_metrics_by_hand() -> None:
    samples = [
        sample(1.0, group=0, num=2, log_prob=-1.0),
        sample(0.0, group=0, num=4, log_prob=-2.0, status=Status.TRUNCATED),
        sample(0.0, group=1, num=3, log_prob=-1.0),
        sample(0.0, group=1, num=3, log_prob=-1.0),
    ]
    samples[0].rewards["format"] = 0.5
    rollout = Rollout(samples, num_generated=3, dropped={"all 2 rewards are 0": 1})
    assert rollout_metrics(rollout) == {
        "raw_reward": 0.25,
        "reward_min": 0.0,
        "reward_max": 1.0,
        "log_probs": -16 / 12,
        "response_len": 3.0,
        "response_len_max": 4.0,
        "truncated": 0.25,
        "zero_variance_groups": 0.5,
        "dropped_groups": 1.0,
        "reward/format": 0.5,
    }


def test_evaluation_metrics_by_hand() -> None:
    groups = [[sample(1.0), sample(0.0)], [sample(0.0), sample(0.0)]]
    # pass@1 is the mean over groups of c/n; pass@2 of n=2 is 1 when any is right
    assert evaluation_metrics(groups, 2) == {
        "accuracy": 0.25,
        "response_len": 2.0,
        "truncated": 0.0,
        "pass@1": 0.25,
        "pass@2": 0.5,
    }
    assert "pass@1" not in evaluation_metrics([[sample(1.0)]], 1)


def test_a_length_penalty_counts_neither_for_the_filter_nor_as_the_raw_reward() -> None:
    group = [sample(0.0), sample(-0.5)]
    group[1].rewards |= {"unshaped": 0.0, "overlong": -0.5}
    assert [one.score for one in group] == [0.0, 0.0]
    assert zero_variance(group) == "all 2 rewards are 0"
    metrics = rollout_metrics(Rollout(group, num_generated=1))
    assert (metrics["raw_reward"], metrics["reward_min"], metrics["reward/overlong"]) == (0.0, 0.0, -0.5)
    assert "reward/unshaped" not in metrics
