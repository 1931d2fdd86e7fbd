"""GRPO: the clipped policy objective with an advantage relative to the group (arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import milepost
from milepost.components import AlgorithmTraits, Component
from pydantic import Field

if TYPE_CHECKING:
    from milepost_grpo.loss import GRPO


class GRPOOptions(milepost.Options):
    """Options of GRPO."""

    eps_clip: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """How far under 1 the probability ratio counts."""
    eps_clip_high: Annotated[float, Field(ge=0.0)] | None = None
    """How far over 1 the ratio counts; default eps_clip. DAPO's clip-higher is 0.28."""
    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bounds the loss of a token with negative advantage to this many times it; null turns it off."""


def build(options: GRPOOptions) -> GRPO:
    """Build the loss; torch is imported here."""
    from milepost_grpo.loss import GRPO

    return GRPO(options)


@milepost.hookimpl
def milepost_algorithms() -> Iterable[Component[GRPO]]:
    """Provide `grpo`."""
    traits = AlgorithmTraits(advantage="group", aggregation="sample_mean", group=True)
    return [Component("grpo", GRPOOptions, traits, build, "Clipped policy gradient, advantages relative to the group.")]
