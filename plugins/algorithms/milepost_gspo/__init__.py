"""GSPO: one probability ratio per sequence (arXiv 2507.18071)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import milepost
from milepost.components import AlgorithmTraits, Component
from milepost.functional.clip_options import ClipOptions
from pydantic import Field

if TYPE_CHECKING:
    from milepost_gspo.loss import GSPO


class GSPOOptions(ClipOptions):
    """Options of GSPO; a sequence's mean log-ratio is small, and so are the bounds of its ratio."""

    eps_clip: Annotated[float, Field(ge=0.0, lt=1.0)] = 3e-4
    """How far under 1 the ratio of a sequence counts."""
    eps_clip_high: Annotated[float, Field(ge=0.0)] | None = 4e-4
    """How far over 1 the ratio of a sequence counts; null for eps_clip."""


def build(options: GSPOOptions) -> GSPO:
    """Build the loss; torch is imported here."""
    from milepost_gspo.loss import GSPO

    return GSPO(options)


@milepost.hookimpl
def milepost_algorithms() -> Iterable[Component[GSPO]]:
    """Provide `gspo`."""
    traits = AlgorithmTraits(advantage="group", aggregation="sample_mean", group=True)
    return [Component("gspo", GSPOOptions, traits, build, "Clipped policy gradient with one ratio per sequence.")]
