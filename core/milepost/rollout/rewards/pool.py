"""Rewards: scoring samples while others still generate, whatever a reward does.

pool = RewardPool(config.reward, base_dir=plan.base_dir, log_dir=plan.run_dir / "logs")
await pool.start()
pool.reset_stats(expected=512)
scored = await pool.score(samples)        # as often as wanted, also at the same time
pool.check_budget()
pool.close()
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from milepost.config.schema import RewardSection
from milepost.errors import RunError
from milepost.registry import resolve
from milepost.rollout.rewards.calls import Failure, Rewards, Scope, call_reward, checked, failure_of, scope_of
from milepost.rollout.rewards.wire import Answer
from milepost.rollout.rewards.workers import Call, WorkerPool
from milepost.samples import Sample

MIN_EXPECTED = 64
"""Samples the error budget is taken of at least, where nobody said how many a rollout has."""


@dataclass(frozen=True, slots=True)
class Scored:
    """What one sample got."""

    rewards: Rewards
    """Named rewards; `reward` is the one trained on, and the only one of a sample whose reward failed."""
    failure: Failure | None = None


@dataclass(slots=True)
class RewardStats:
    """What happened since the last `reset_stats`."""

    scored: int = 0
    """Samples scored, failed ones included."""
    failed: Counter[str] = field(default_factory=Counter)
    """Samples whose reward failed, by kind of failure."""
    seconds: float = 0.0
    """Time spent in rewards, added up over workers."""
    restarts: int = 0
    """Worker processes replaced."""
    first_failure: Failure | None = None

    @property
    def failures(self) -> int:
        """Samples whose reward failed."""
        return self.failed.total()


class RewardPool:
    """Scores samples by the run's reward, in worker processes or inline."""

    def __init__(
        self,
        section: RewardSection,
        *,
        base_dir: Path,
        log_dir: Path,
        plugins_block: Iterable[str] = (),
        plugin_modules: Iterable[str] = (),
    ) -> None:
        """Prepare for the reward that `section` names; nothing starts before `start`.

        `base_dir` is the run config's folder: it comes first on the module path where the reward runs. A worker writes
        what it prints to `log_dir`/reward-N.log. Workers load plugins anew, with `plugins_block` and `plugin_modules`
        as in the run config's section `plugins`; inline, the process's own registry is used.
        """
        self._section = section
        self._base_dir = Path(base_dir).absolute()
        self._stats = RewardStats()
        self._expected: int | None = None
        self._restarts_before = 0
        self._backend: _Workers | _Inline
        if section.placement == "inline":
            self._backend = _Inline(section, self._base_dir)
        else:
            setup = {
                "name": section.name,
                "options": section.options,
                "block": list(plugins_block),
                "modules": list(plugin_modules),
                "base_dir": str(self._base_dir),
                "memory_bytes": None if section.memory_gb is None else int(section.memory_gb * 2**30),
                "timeout": section.timeout,
            }
            self._backend = _Workers(
                WorkerPool(setup, workers=section.workers, timeout=section.timeout, log_dir=Path(log_dir))
            )

    async def start(self) -> None:
        """Build the reward, in every worker; return when all are ready. `score` does it where it was not done.

        Raises RunError, with the traceback, if the reward cannot be built in a worker; inline PluginError.
        """
        await self._backend.start()

    async def score(self, samples: Sequence[Sample]) -> list[Scored]:
        """Score samples and return what each got, in order; calls may overlap. The samples are not changed.

        A group reward gets the samples of one call that share a group id together, so pass whole groups. The time
        limit is that of one call of the reward. A failed reward is worth `on_error`.

        Raises RunError if `on_error` is null and a reward failed, if more rewards failed than the error budget allows
        for `expected` samples (see `reset_stats`), or if the workers cannot go on.
        """
        scope = await self._backend.start()
        places = _places(samples, scope)
        calls = [Call([samples[place] for place in group]) for group in places]
        scored: dict[int, Scored] = {}
        answers = self._backend.submit(calls)
        try:
            for group, future in zip(places, answers, strict=True):
                answer, seconds = await future
                if isinstance(answer, RunError):
                    raise answer
                self._count(answer, len(group), seconds)
                scored.update(zip(group, self._results(answer, len(group)), strict=True))
        finally:
            for call, future in zip(calls, answers, strict=True):
                call.wanted = False
                future.cancel()
        return [scored[place] for place in range(len(samples))]

    def stats(self) -> RewardStats:
        """Return counts since the last `reset_stats`."""
        self._stats.restarts = self._backend.restarts - self._restarts_before
        return self._stats

    def reset_stats(self, expected: int | None = None) -> None:
        """Begin a new rollout, of which `expected` samples will be scored.

        The error budget is a share of these. Without a number it is one of what has been scored, but of at least 64.
        """
        self._stats = RewardStats()
        self._restarts_before = self._backend.restarts
        self._expected = expected

    def check_budget(self) -> None:
        """Raise RunError if more of what was scored since `reset_stats` failed than the error budget allows."""
        self._check_budget(self._stats.scored)

    def close(self) -> None:
        """End the workers and all they started. Scoring that goes on raises RunError; closing twice is fine."""
        self._backend.close()

    @property
    def worker_pids(self) -> list[int]:
        """Process ids of the running workers; empty inline."""
        return self._backend.pids

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _count(self, answer: Answer, samples: int, seconds: float) -> None:
        stats = self._stats
        stats.scored += samples
        stats.seconds += seconds
        if isinstance(answer, Failure):
            stats.failed[answer.kind] += samples
            stats.first_failure = stats.first_failure or answer
            self._check_budget(max(stats.scored, self._expected or MIN_EXPECTED))

    def _check_budget(self, total: int) -> None:
        stats, budget = self._stats, self._section.error_budget
        if stats.first_failure is not None and stats.failures > budget * total:
            kinds = ", ".join(f"{count} {kind}" for kind, count in stats.failed.most_common())
            raise RunError(
                f"reward {self._section.name!r} failed for {stats.failures} of {stats.scored} samples scored in this "
                f"rollout ({kinds}); reward.error_budget allows {budget:g} of {total}. The first failure:\n"
                f"{stats.first_failure.detail}"
            )

    def _results(self, answer: Answer, count: int) -> list[Scored]:
        if not isinstance(answer, Failure):
            return [Scored(rewards) for rewards in answer]
        if self._section.on_error is None:
            raise RunError(
                f"reward {self._section.name!r} failed ({answer.kind}) and reward.on_error is null, so the run stops "
                f"at the first failure; give a score to go on with instead.\n{answer.detail}"
            )
        return [Scored({"reward": self._section.on_error}, answer) for _ in range(count)]


class _Workers:
    """Calls in worker processes."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._started = False

    @property
    def restarts(self) -> int:
        return self._pool.restarts

    @property
    def pids(self) -> list[int]:
        return self._pool.pids

    async def start(self) -> Scope:
        if not self._started:
            self._started = True
            self._pool.start()
        # Shielded: a caller that gives up must not take the result away from the others.
        ready = await asyncio.shield(asyncio.wrap_future(self._pool.ready))
        if isinstance(ready, RunError):
            raise ready
        return ready.scope

    def submit(self, calls: Sequence[Call]) -> list[asyncio.Future[tuple[Answer | RunError, float]]]:
        answers = _answers_together(calls)
        self._pool.submit(calls)
        return answers

    def close(self) -> None:
        self._pool.close()


class _Inline:
    """Calls in the controller's own event loop: no time limit, and a debugger works."""

    restarts = 0

    def __init__(self, section: RewardSection, base_dir: Path) -> None:
        self._section = section
        self._base_dir = base_dir
        self._reward: Any = None

    @property
    def pids(self) -> list[int]:
        return []

    async def start(self) -> Scope:
        if self._reward is None:
            if str(self._base_dir) not in sys.path:
                sys.path.insert(0, str(self._base_dir))
            self._reward = resolve("reward", self._section.name, self._section.options)
        return scope_of(self._reward)

    def submit(self, calls: Sequence[Call]) -> list[asyncio.Future[tuple[Answer | RunError, float]]]:
        # One task each: whatever else the loop has to do gets its turn between two calls.
        return [asyncio.ensure_future(self._answer(call.samples)) for call in calls]

    async def _answer(self, samples: Sequence[Sample]) -> tuple[Answer, float]:
        scope = scope_of(self._reward)
        began = time.perf_counter()
        answer: Answer
        try:
            result = call_reward(self._reward, scope, samples)
            if inspect.isawaitable(result):
                result = await result
            answer = checked(scope, result, len(samples))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what a reward raises costs this score and no more
            answer = failure_of(error)
        return answer, time.perf_counter() - began

    def close(self) -> None:
        self._reward = None


def _answers_together(calls: Sequence[Call]) -> list[asyncio.Future[tuple[Answer | RunError, float]]]:
    """Return the calls' answers as futures of the running loop, which is woken once when all are there.

    Waking it for each would cost more than most rewards do. What may stop the run is told at once.
    """
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[tuple[Answer | RunError, float]]] = [loop.create_future() for _ in calls]
    left = itertools.count(len(calls) - 1, -1)

    def deliver() -> None:
        for call, future in zip(calls, futures, strict=True):
            if call.future.done() and not future.done():
                future.set_result(call.future.result())

    def answered(settled: Future[tuple[Answer | RunError, float]]) -> None:
        # From the thread that drives a worker, also when nobody listens any more.
        if (next(left) == 0 or not isinstance(settled.result()[0], list)) and not loop.is_closed():
            loop.call_soon_threadsafe(deliver)

    for call in calls:
        call.future.add_done_callback(answered)
    return futures


def _places(samples: Sequence[Sample], scope: Scope) -> list[list[int]]:
    """Return the positions of the samples of each call: one each, or all of a group."""
    if scope == "sample":
        return [[place] for place in range(len(samples))]
    groups: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(place)
    return list(groups.values())
