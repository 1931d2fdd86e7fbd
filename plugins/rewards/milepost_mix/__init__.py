"""Composition without code: `mix` adds several rewards up, `format` scores the form of a response."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import milepost
from milepost.components import RewardComponent, RewardTraits
from pydantic import Field, ValidationError, field_validator

if TYPE_CHECKING:
    from milepost.config.plan import Plan

    from milepost_mix.form import FormatReward

RESERVED = frozenset({"reward", "unshaped", "overlong"})
"""Names of a sample's rewards that the kernel gives."""


class Part(milepost.Options):
    """One reward of a mix."""

    name: str
    """Reward by name."""
    weight: float = 1.0
    """Its score is multiplied by this before it is added."""
    only: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """Values of the metadata at `route` for which it counts; default all."""
    gate: bool = False
    """Where it scores 0 or less, the other parts do not count."""
    options: Annotated[dict[str, Any], Field(default_factory=dict)]
    """The reward's own options."""


class MixOptions(milepost.Options):
    """Options of `mix`."""

    parts: Annotated[dict[str, Part], Field(min_length=1)]
    """Name of a part, and of its curve in the metrics, to the reward: {name, weight, only, gate, options}."""
    route: str | None = None
    """Dotted path in a sample's metadata whose value `only` of the parts speaks of."""

    @field_validator("parts")
    @classmethod
    def _names(cls, parts: Mapping[str, Part]) -> Mapping[str, Part]:
        taken = sorted(RESERVED & parts.keys())
        if taken:
            raise ValueError(f"a part is named {taken[0]}, which the metrics use for something else; rename it")
        return parts


class FormatOptions(milepost.Options):
    """Options of `format`."""

    pattern: str
    """Regular expression that is searched in the response; `.` also means a line's end."""
    right: float = 1.0
    """Score of a response that has it."""
    wrong: float = 0.0
    """Score of one that has not."""
    max_chars: Annotated[int, Field(gt=0)] = 100_000
    """Characters from either end that are looked at, at most; a longer response is cut in the middle."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error as error:
            raise ValueError(f"expected a regular expression, but it does not compile: {error}") from None
        return value


def check(plan: Plan, options: MixOptions) -> Iterator[str]:
    """Yield what is wrong with the parts, while planning: an unknown reward, options that do not fit, a route."""
    from milepost.registry import current

    for label, part in options.parts.items():
        try:
            current().get("reward", part.name).component.options.model_validate(part.options)
        except milepost.PluginError as error:
            yield f"parts.{label}: {error}"
        except ValidationError as error:
            for problem in error.errors(include_url=False):
                path = ".".join(map(str, problem["loc"]))
                yield f"parts.{label}.options.{path}: {problem['msg']} (options of reward {part.name!r})"
        if part.only is not None and options.route is None:
            yield f"parts.{label}.only needs `route`, the metadata key whose values it lists"


def build(options: MixOptions) -> Any:
    """Build the parts, and what adds them up."""
    from milepost_mix.mix import make_mix

    return make_mix(options)


def build_format(options: FormatOptions) -> FormatReward:
    """Build `format`."""
    from milepost_mix.form import FormatReward

    return FormatReward(options)


@milepost.hookimpl
def milepost_rewards() -> Iterable[RewardComponent]:
    """Provide `mix` and `format`."""
    mix_traits = RewardTraits(needs_label=False, check=check)
    return [
        milepost.Component("mix", MixOptions, mix_traits, build, "Several rewards, weighted and routed by metadata."),
        milepost.Component(
            "format", FormatOptions, RewardTraits(needs_label=False), build_format, "Whether a response has a form."
        ),
    ]
