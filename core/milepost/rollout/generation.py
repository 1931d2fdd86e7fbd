"""One rollout: groups are generated, scored while others still generate, and filtered.

What generates for one task can be replaced (`rollout.generate: module:function`); a function gets the task and an
engine that already knows how to sample, and may call it as often as it likes (tools, several turns, several agents).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from milepost.errors import RunError
from milepost.rollout.engine import Engine, SamplingParams
from milepost.samples import UNSHAPED, Sample, Status, Task

T = TypeVar("T")

TRAINING, EVALUATION = 0, 1
"""First number of every sampling key, so that evaluation never draws what training draws."""


class TaskEngine:
    """An engine bound to one rollout of one task: knows the sampling parameters and seeds every call differently."""

    def __init__(self, engine: Engine, task: Task, params: SamplingParams, key: Sequence[int]) -> None:
        self._engine = engine
        self._task = task
        self._key = tuple(key)
        self._num_calls = 0
        self.params = params

    async def generate(self, tokens: Sequence[int] | None = None, params: SamplingParams | None = None) -> Sample:
        """Continue `tokens` (default: the task's prompt); pass `sample.tokens` for a further turn."""
        self._num_calls += 1
        prompt = self._task.tokens if tokens is None else tokens
        return await self._engine.generate(self._task, prompt, params or self.params, (*self._key, self._num_calls))


Generate = Callable[[Task, TaskEngine], Coroutine[Any, Any, list[Sample]]]


async def generate_response(task: Task, engine: TaskEngine) -> list[Sample]:
    """Generate one response to the task's prompt: the default."""
    return [await engine.generate()]


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines together and return their results in order; the first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(one) for one in work]
    except BaseExceptionGroup as failures:
        error: BaseException = failures
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None
    return [task.result() for task in tasks]


class Scorer(Protocol):
    """Scores the samples of one group, setting their `rewards`."""

    def begin(self, expected: int) -> None:
        """Begin to count anew: about `expected` samples are going to be scored."""
        ...

    async def score(self, samples: Sequence[Sample]) -> None:
        """Set `rewards` on each sample."""
        ...


async def generate_group(
    engine: Engine,
    task: Task,
    *,
    generate: Generate,
    scorer: Scorer,
    params: SamplingParams,
    group: int,
    num_rollouts: int,
    key: Sequence[int],
) -> list[Sample]:
    """Generate and score `num_rollouts` rollouts of one task.

    A rollout may be several sequences; they share a rollout id. Ids are `group * num_rollouts + i`.
    """
    engines = [TaskEngine(engine, task, params, (*key, i)) for i in range(num_rollouts)]
    rollouts = await all_of(generate(task, bound) for bound in engines)
    samples = []
    for i, rollout in enumerate(rollouts):
        if not rollout:
            raise RunError(f"the generate function returned no sample for task {task.index}; return at least one")
        for sample in rollout:
            sample.group, sample.rollout = group, group * num_rollouts + i
            samples.append(sample)
    await scorer.score(samples)
    return samples


@dataclass(slots=True)
class Rollout:
    """The samples of one rollout, groups in a fixed order, and what happened on the way."""

    samples: list[Sample]
    num_generated: int = 0
    """Groups generated, those that a filter dropped included."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Groups dropped, by reason."""


def zero_variance(samples: Sequence[Sample]) -> str | None:
    """Give the reason to drop a group whose rewards are all equal, or None to keep it (arXiv 2503.14476).

    A group of one has no spread to speak of and is kept: dropping it would starve the batch. What counts is the reward
    as it was scored: a length penalty alone makes no group worth training on.
    """
    rewards = {sample.score for sample in samples}
    if len(samples) < 2 or len(rewards) > 1:
        return None
    return f"all {len(samples)} rewards are {rewards.pop():g}"


@dataclass(slots=True)
class RolloutGenerator:
    """Generates whole rollouts from a source of tasks."""

    engine: Engine
    scorer: Scorer
    next_tasks: Callable[[int], list[Task]]
    """Gives the next n tasks."""
    params: SamplingParams
    seed: int
    batch_size: int
    samples_per_prompt: int
    generate: Generate = generate_response
    drop: Callable[[Sequence[Sample]], str | None] | None = None
    """Filter: a reason to drop a group, or None to keep it."""
    max_rounds: int = 1

    async def __call__(self, index: int, on_group: Callable[[], object] | None = None) -> Rollout:
        """Generate rollout number `index`; `on_group` is called as each group is finished, for a progress bar.

        With a filter, dropped groups are made up for in further rounds. A round is scored whole before the next
        begins, and kept groups keep their order, so that the outcome does not depend on which reward answered first.
        """
        rollout = Rollout([])
        kept = 0
        for _ in range(self.max_rounds if self.drop else 1):
            groups = await self._round(index, rollout.num_generated, self.batch_size - kept, on_group)
            rollout.num_generated += len(groups)
            for group in groups:
                reason = self.drop(group) if self.drop else None
                if reason is None:
                    rollout.samples += group
                    kept += 1
                else:
                    rollout.dropped[reason] = rollout.dropped.get(reason, 0) + 1
            if kept == self.batch_size:
                break
        if kept < self.batch_size:
            raise RunError(
                f"rollout {index}: {kept} of {self.batch_size} groups passed the filter in {self.max_rounds} rounds "
                f"(dropped: {rollout.dropped}); raise rollout.max_filter_rounds, or train on problems that are neither "
                "always nor never solved"
            )
        return rollout

    async def _round(
        self, index: int, first: int, count: int, on_group: Callable[[], object] | None
    ) -> list[list[Sample]]:
        """Generate `count` groups, the first of which is group number `first` of this rollout."""

        async def one(position: int, task: Task) -> list[Sample]:
            samples = await generate_group(
                self.engine,
                task,
                generate=self.generate,
                scorer=self.scorer,
                params=self.params,
                group=position,
                num_rollouts=self.samples_per_prompt,
                key=(self.seed, TRAINING, index, position),
            )
            if on_group is not None:
                on_group()
            return samples

        tasks = self.next_tasks(count)
        return await all_of(one(first + i, task) for i, task in enumerate(tasks))


def rollout_metrics(rollout: Rollout) -> dict[str, float]:
    """Summarise a rollout; names as in `milepost.tracking.catalogue`."""
    samples = rollout.samples
    count = len(samples)
    num_trainable = [sample.num_trainable for sample in samples]
    log_probs = sum(float(sample.log_probs[sample.trainable].sum(dtype="float64")) for sample in samples)
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.group, []).append(sample)
    metrics = {
        "raw_reward": sum(sample.score for sample in samples) / count,
        "reward_min": min(sample.score for sample in samples),
        "reward_max": max(sample.score for sample in samples),
        "log_probs": log_probs / max(1, sum(num_trainable)),
        "response_len": sum(num_trainable) / count,
        "response_len_max": float(max(num_trainable)),
        "truncated": sum(sample.status is Status.TRUNCATED for sample in samples) / count,
        "zero_variance_groups": sum(len({s.reward for s in group}) == 1 for group in groups.values()) / len(groups),
        "dropped_groups": float(sum(rollout.dropped.values())),
    }
    names = sorted({name for sample in samples for name in sample.rewards} - {"reward", UNSHAPED})
    for name in names:
        values = [sample.rewards[name] for sample in samples if name in sample.rewards]
        metrics[f"reward/{name}"] = sum(values) / len(values)
    return metrics
