"""The promises of a reward, tried on ordinary and on hostile responses."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from milepost.alarm import TimeIsUpError, time_limit
from milepost.components import Component, GroupReward, Reward, RewardTraits
from milepost.registry import current
from milepost.rollout.rewards.calls import Rewards, Scope, call_reward, checked, is_asynchronous, scope_of
from milepost.rollout.rewards.wire import decode_calls, encode_calls
from milepost.samples import Sample, Task
from milepost.testing.findings import Finding, Findings, Subject, find_subject

LABEL = "42"
TIME_LIMIT = 10.0
"""Seconds one score may take here; a run's default is 30, on a machine that does other things too."""
MEGABYTE = 10**6

ORDINARY = {
    "a right answer": "<think>Six times seven is 42.</think>\nThe answer is \\boxed{42}.",
    "a wrong answer": "<think>Six times seven is 41.</think>\nThe answer is \\boxed{41}.",
    "no answer": "I do not know.",
}
"""Responses as policies write them."""

HOSTILE = {
    "an empty response": "",
    "blanks": " \n\t \r\n",
    "unicode": "\\boxed{\u0664\u0662} \U0001d7dc\U0001d7da \u202e42\u202c e\u0301 \x00 \U0001f469\u200d\U0001f52c",
    "unclosed thought and box": "<think>\\boxed{42",
    "a megabyte of letters": "a" * MEGABYTE,
    "a megabyte of digits": "9" * MEGABYTE,
    "a megabyte of blanks": " " * MEGABYTE,
    "a megabyte of words": "so it is " * (MEGABYTE // 9),
    "a megabyte of open brackets": "({[" * (MEGABYTE // 3),
    "a megabyte of boxes": "\\boxed{" * (MEGABYTE // 7),
    "a megabyte in one box": "\\boxed{" + "1+" * (MEGABYTE // 2) + "1}",
    "a megabyte of thoughts": "<think>no</think>" * (MEGABYTE // 17),
}
"""What a policy may come to write."""


def check_reward(
    reward: str | Component[Reward | GroupReward] | Reward | GroupReward,
    options: Mapping[str, Any] | None = None,
    *,
    traits: RewardTraits | None = None,
    label: Any = LABEL,
    metadata: Mapping[str, Any] | None = None,
    texts: Sequence[str] = (),
    timeout: float = TIME_LIMIT,
) -> list[Finding]:
    """Try every promise of a reward and return those that were not kept.

    - It scores samples or groups, as its traits say.
    - Any response gives a finite number, or a mapping of names to such with `reward` among them: also an empty one,
      one in unusual Unicode, one of a megabyte; within `timeout` seconds.
    - One response has one score: when asked again, after others, by a reward built anew, from a sample that went
      through a worker's pipe, and from an async reward while other calls run.
    - The sample stays as it was.
    - A reward that needs no label does without one.
    - A group reward scores in the order of the samples, and a group of one.
    - Options survive pickling and JSON.

    Not to be called from inside a running event loop.

    Args:
        reward: registered name, component, or a built reward.
        options: of the component.
        traits: of a built reward; taken from the component otherwise.
        label: of the samples, as a dataset for this reward would have it.
        metadata: of the samples' tasks.
        texts: more responses to try, for example what a dataset's best answers look like.
        timeout: seconds one score may take.

    Returns:
        Findings; empty where all promises are kept.

    Raises:
        PluginError: there is no such component, or it cannot be built.
        ValueError: options were given beside a built reward.
    """
    subject = find_subject("reward", reward, options)
    known = subject.traits if isinstance(subject.traits, RewardTraits) else traits
    findings = Findings()
    findings.check_options(subject)
    with findings.surviving("declared scope", type(subject.built).__name__):
        scope = scope_of(subject.built)
        # Options may choose the scope; the traits speak of the reward without any.
        if known is not None and not options:
            expected = f"scope={scope!r}, as it was built"
            findings.require(known.scope == scope, "declared scope", "the traits", expected, repr(known.scope))
        task = Task(index=0, prompt="What is 6 * 7?", tokens=(1, 2, 3), label=label, metadata=dict(metadata or {}))
        cases = {**ORDINARY, **{f"given text {number}": text for number, text in enumerate(texts)}}
        _Check(findings, subject, reward, scope, task, timeout).run(
            cases, needs_label=known is None or known.needs_label
        )
    return list(findings)


@dataclass(frozen=True, slots=True)
class _Check:
    """One reward on its samples."""

    findings: Findings
    subject: Subject
    given: Any
    scope: Scope
    task: Task
    timeout: float

    def run(self, cases: Mapping[str, str], *, needs_label: bool) -> None:
        before = len(self.findings)
        scores = {case: self._try("finite score", case, self._sample(text)) for case, text in cases.items()}
        if len(self.findings) > before:
            # What fails on ordinary responses fails on all; one finding for each says enough.
            return
        for case, text in HOSTILE.items():
            self._try("finite score", case, self._sample(text))
        for case, text in cases.items():
            self._same("deterministic", f"{case}, scored again after others", scores[case], self._sample(text))
        self._check_purity(cases)
        self._check_pipe(cases, scores)
        self._check_anew(cases, scores)
        if not needs_label:
            for case, text in cases.items():
                self._try("no label", case, self._sample(text, task=replace(self.task, label=None)))
        if self.scope == "group":
            self._check_group(cases)
        if is_asynchronous(self.subject.built):
            self._check_overlap(cases, scores)

    def _sample(self, text: str, *, task: Task | None = None, group: int = 0) -> Sample:
        """Return a sample with this response; three tokens of prompt, four of response."""
        tokens = np.arange(1, 8, dtype=np.int32)
        trainable = np.array([False] * 3 + [True] * 4)
        return Sample(
            task=task or self.task,
            tokens=tokens,
            trainable=trainable,
            log_probs=np.where(trainable, np.float32(-0.5), np.float32("nan")).astype(np.float32),
            versions=np.where(trainable, 0, -1).astype(np.int32),
            text=text,
            group=group,
            rollout=group,
        )

    def _score(self, samples: Sequence[Sample], reward: Any = None) -> list[Rewards]:
        """Call the reward as the kernel does. Raises whatever it raises, TimeoutError in place of TimeIsUpError."""
        built = self.subject.built if reward is None else reward
        try:
            with time_limit(self.timeout):
                answer = call_reward(built, self.scope, samples)
                if inspect.isawaitable(answer):
                    answer = asyncio.run(_wait(answer))
        except TimeIsUpError as error:
            raise TimeoutError(str(error)) from None
        return checked(self.scope, answer, len(samples))

    def _try(self, promise: str, case: str, *samples: Sample) -> list[Rewards] | None:
        """Score; None, and a finding, where that fails."""
        expected = f"a finite score within {self.timeout:g} s"
        try:
            return self._score(samples)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the check outlives what it checks, and reports it
            self.findings.append(Finding(promise, case, expected, f"{type(error).__name__}: {_short(str(error))}"))
            return None

    def _same(
        self, promise: str, case: str, expected: list[Rewards] | None, *samples: Sample, reward: Any = None
    ) -> None:
        with self.findings.surviving(promise, case):
            got = self._score(samples, reward)
            self.findings.require(got == expected, promise, case, str(expected), got)

    def _check_purity(self, cases: Mapping[str, str]) -> None:
        for case, text in cases.items():
            sample = self._sample(text)
            before = encode_calls([(0, [sample])])
            self._try("finite score", case, sample)
            self.findings.require(
                encode_calls([(0, [sample])]) == before,
                "samples stay as they were",
                case,
                "the sample as it was",
                _changed(before, encode_calls([(0, [sample])])),
            )

    def _check_pipe(self, cases: Mapping[str, str], scores: Mapping[str, list[Rewards] | None]) -> None:
        """A worker's samples came as JSON: lists for tuples, no extras."""
        for case, text in cases.items():
            [(_, samples)] = decode_calls(json.loads(encode_calls([(0, [self._sample(text)])])))
            self._same("the same in a worker", f"{case}, sent to a worker", scores[case], *samples)

    def _check_anew(self, cases: Mapping[str, str], scores: Mapping[str, list[Rewards] | None]) -> None:
        """Every worker builds a reward of its own."""
        component = current().get("reward", self.given).component if isinstance(self.given, str) else self.given
        if not isinstance(component, Component):
            return
        with self.findings.surviving("deterministic", "built anew"):
            other = component.build(self.subject.options)
            for case, text in reversed(list(cases.items())):
                self._same(
                    "deterministic", f"{case}, by a reward built anew", scores[case], self._sample(text), reward=other
                )

    def _check_group(self, cases: Mapping[str, str]) -> None:
        samples = [self._sample(text) for text in cases.values()]
        promise, case = "order of a group", f"{len(samples)} samples, and the same in reverse"
        forward = self._try(promise, case, *samples)
        backward = self._try(promise, case, *reversed(samples))
        if forward is not None and backward is not None:
            self.findings.require(
                forward == backward[::-1], promise, case, f"the same scores in reverse, {forward[::-1]}", backward
            )

    def _check_overlap(self, cases: Mapping[str, str], scores: Mapping[str, list[Rewards] | None]) -> None:
        """Calls of an async reward run at the same time, in one event loop."""
        promise, case = "overlapping calls", f"{len(cases)} calls at the same time"
        calls = [[self._sample(text, group=number)] for number, text in enumerate(cases.values())]

        async def all_at_once() -> list[Any]:
            return await asyncio.gather(*(_wait(call_reward(self.subject.built, self.scope, call)) for call in calls))

        with self.findings.surviving(promise, case):
            got = [checked(self.scope, answer, 1) for answer in asyncio.run(all_at_once())]
            self.findings.require(got == list(scores.values()), promise, case, str(list(scores.values())), got)


async def _wait(answer: Any) -> Any:
    return await answer


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."


def _changed(before: bytes, after: bytes) -> str:
    """Name the fields of a sample, or of its task, that differ between two lines of the wire."""
    old, new = json.loads(before), json.loads(after)
    (_, [first]), (_, [second]) = old["calls"][0], new["calls"][0]
    fields = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    fields += ["task"] if old["tasks"] != new["tasks"] else []
    return f"{', '.join(fields) or 'nothing'} changed"
