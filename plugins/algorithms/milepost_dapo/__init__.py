"""DAPO: GRPO with clip-higher and token-level loss (arXiv 2503.14476).

Its other two parts are the rollout's and the reward's: dynamic sampling is `rollout.filter: zero_variance`, overlong
shaping `reward.overlong: {buffer: N}`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import milepost
from milepost.components import AlgorithmTraits, Component
from milepost.functional.clip_options import DualClipOptions
from pydantic import Field

if TYPE_CHECKING:
    from milepost_dapo.loss import DAPO


class DAPOOptions(DualClipOptions):
    """Options of DAPO."""

    eps_clip_high: Annotated[float, Field(ge=0.0)] | None = 0.28
    """How far over 1 the ratio counts (clip-higher): unlikely tokens may grow faster. null for eps_clip."""


def build(options: DAPOOptions) -> DAPO:
    """Build the loss; torch is imported here."""
    from milepost_dapo.loss import DAPO

    return DAPO(options)


@milepost.hookimpl
def milepost_algorithms() -> Iterable[Component[DAPO]]:
    """Provide `dapo`."""
    traits = AlgorithmTraits(advantage="group", aggregation="token_mean", group=True)
    return [Component("dapo", DAPOOptions, traits, build, "GRPO with clip-higher and every token weighing the same.")]
