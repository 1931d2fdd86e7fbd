"""Adding rewards up: which parts count for a sample, and what their scores are worth."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import milepost
from milepost.samples import Sample

from milepost_mix import MixOptions, Part

Scores = dict[str, float]


class MixedPart:
    """One built reward of a mix."""

    def __init__(self, label: str, part: Part) -> None:
        self.label = label
        self.part = part
        self.reward = milepost.resolve("reward", part.name, part.options)
        self.is_group = callable(getattr(self.reward, "score_group", None))
        method: Callable[..., Any] = self.reward.score_group if self.is_group else self.reward.score
        self.is_async = inspect.iscoroutinefunction(method)

    def applies(self, route: object) -> bool:
        """Whether the part counts for a sample with this value at `route`."""
        return self.part.only is None or str(route) in self.part.only

    def named(self, answer: Any) -> Scores:
        """Return what a reward answered under the part's name, further numbers of its own below it."""
        if not isinstance(answer, Mapping):
            return {self.label: float(answer)}
        return {self.label if name == "reward" else f"{self.label}/{name}": float(x) for name, x in answer.items()}


class Mix:
    """What all forms of a mix share: choosing parts, and adding scores up."""

    def __init__(self, parts: Sequence[MixedPart], route: str | None) -> None:
        self._parts = parts
        self._route = route

    def chosen(self, sample: Sample) -> list[MixedPart]:
        """Return the parts that count for a sample. Raises ValueError if none does, or it lacks the routing key."""
        value = self._value(sample)
        parts = [part for part in self._parts if part.applies(value)]
        if not parts:
            raise ValueError(
                f"no part of the mix is for {self._route} = {value!r}; name it in a part's `only`, or add a part "
                "without one"
            )
        return parts

    def total(self, scores: Mapping[str, float], parts: Sequence[MixedPart]) -> Scores:
        """Return the weighted sum as `reward`, beside each part's own score."""
        counted = parts
        if any(part.part.gate and scores[part.label] <= 0 for part in parts):
            counted = [part for part in parts if part.part.gate]
        return {"reward": sum(part.part.weight * scores[part.label] for part in counted), **scores}

    def _value(self, sample: Sample) -> object:
        if self._route is None:
            return None
        value: Any = sample.task.metadata
        for key in self._route.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise ValueError(
                    f"the sample's metadata has no {self._route!r}, by which the mix routes; it has "
                    f"{', '.join(sorted(map(str, sample.task.metadata))) or 'nothing'} (data.metadata names the field)"
                )
            value = value[key]
        return value


class SampleMix(Mix):
    """A mix of rewards that score sample by sample."""

    def score(self, sample: Sample) -> Scores:
        """Return `reward`, the weighted sum, and each part's own score."""
        parts = self.chosen(sample)
        scores: Scores = {}
        for part in parts:
            scores |= part.named(part.reward.score(sample))
        return self.total(scores, parts)


class AsyncSampleMix(Mix):
    """The same where a part is asynchronous; the parts of a sample run at the same time."""

    async def score(self, sample: Sample) -> Scores:
        """Return `reward`, the weighted sum, and each part's own score."""
        parts = self.chosen(sample)
        answers = await asyncio.gather(*(_awaited(part.reward.score(sample)) for part in parts))
        scores: Scores = {}
        for part, answer in zip(parts, answers, strict=True):
            scores |= part.named(answer)
        return self.total(scores, parts)


class GroupMix(Mix):
    """A mix with a part that scores whole groups; it is given those samples of the group that it counts for."""

    async def score_group(self, samples: Sequence[Sample]) -> list[Scores]:
        """Return `reward` and each part's own score, for each sample in order."""
        chosen = [self.chosen(sample) for sample in samples]
        scores: list[Scores] = [{} for _ in samples]
        for part in self._parts:
            places = [place for place, parts in enumerate(chosen) if part in parts]
            for place, answer in zip(places, await _answers(part, [samples[place] for place in places]), strict=True):
                scores[place] |= part.named(answer)
        return [self.total(found, parts) for found, parts in zip(scores, chosen, strict=True)]


def make_mix(options: MixOptions) -> SampleMix | AsyncSampleMix | GroupMix:
    """Build the parts and return the mix in the form that they allow."""
    parts = [MixedPart(label, part) for label, part in options.parts.items()]
    if any(part.is_group for part in parts):
        return GroupMix(parts, options.route)
    kind = AsyncSampleMix if any(part.is_async for part in parts) else SampleMix
    return kind(parts, options.route)


async def _answers(part: MixedPart, samples: Sequence[Sample]) -> Sequence[Any]:
    if not samples:
        return []
    if part.is_group:
        answer: Sequence[Any] = await _awaited(part.reward.score_group(samples))
        return answer
    return await asyncio.gather(*(_awaited(part.reward.score(sample)) for sample in samples))


async def _awaited(answer: Any | Awaitable[Any]) -> Any:
    return await answer if inspect.isawaitable(answer) else answer
