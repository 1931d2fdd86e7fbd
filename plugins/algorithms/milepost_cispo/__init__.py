"""CISPO: the importance ratio is clipped, not the update, so every token keeps its gradient (arXiv 2506.13585)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import milepost
from milepost.components import AlgorithmTraits, Component
from milepost.functional.clip_options import ClipOptions
from pydantic import Field

if TYPE_CHECKING:
    from milepost_cispo.loss import CISPO


class CISPOOptions(ClipOptions):
    """Options of CISPO."""

    eps_clip: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """How far under 1 the ratio is kept; 1 is no lower bound, as in the paper."""
    eps_clip_high: Annotated[float, Field(ge=0.0)] | None = 0.28
    """How far over 1 the ratio is kept; null for eps_clip."""


def build(options: CISPOOptions) -> CISPO:
    """Build the loss; torch is imported here."""
    from milepost_cispo.loss import CISPO

    return CISPO(options)


@milepost.hookimpl
def milepost_algorithms() -> Iterable[Component[CISPO]]:
    """Provide `cispo`."""
    traits = AlgorithmTraits(advantage="group", aggregation="token_mean", group=True)
    return [Component("cispo", CISPOOptions, traits, build, "Policy gradient weighed by a clipped, detached ratio.")]
