"""GRPO: the clipped policy objective with an advantage relative to the group (arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import milepost
from milepost.components import AlgorithmTraits, Component
from milepost.functional.clip_options import DualClipOptions

if TYPE_CHECKING:
    from milepost_grpo.loss import GRPO


class GRPOOptions(DualClipOptions):
    """Options of GRPO."""


def build(options: GRPOOptions) -> GRPO:
    """Build the loss; torch is imported here."""
    from milepost_grpo.loss import GRPO

    return GRPO(options)


@milepost.hookimpl
def milepost_algorithms() -> Iterable[Component[GRPO]]:
    """Provide `grpo`."""
    traits = AlgorithmTraits(advantage="group", aggregation="sample_mean", group=True)
    return [Component("grpo", GRPOOptions, traits, build, "Clipped policy gradient, advantages relative to the group.")]
