"""On-policy distillation: the student samples, the teacher says what it thinks of every token (arXiv 2306.13649)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import milepost
from milepost.components import AlgorithmTraits, Component
from milepost.functional.clip_options import DualClipOptions

if TYPE_CHECKING:
    from milepost_distillation.loss import Distillation


class DistillationOptions(DualClipOptions):
    """Options of on-policy distillation."""

    reward_coef: float = 0.0
    """Weight of the reward's advantage beside the teacher's; 0 learns from the teacher alone."""


def build(options: DistillationOptions) -> Distillation:
    """Build the loss; torch is imported here."""
    from milepost_distillation.loss import Distillation

    return Distillation(options)


@milepost.hookimpl
def milepost_algorithms() -> Iterable[Component[Distillation]]:
    """Provide `distillation`."""
    traits = AlgorithmTraits(advantage="raw", aggregation="token_mean", teacher=True)
    summary = "Learns from a teacher on its own samples: reverse KL per token."
    return [Component("distillation", DistillationOptions, traits, build, summary)]
