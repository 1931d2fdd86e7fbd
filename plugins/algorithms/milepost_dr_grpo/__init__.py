"""Dr.GRPO: GRPO without its biases towards long wrong answers and easy problems (arXiv 2503.20783).

The group advantage is not divided by the standard deviation, and losses are summed over tokens and divided by a
constant length instead of each response's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import milepost
from milepost.components import AlgorithmTraits, Component
from milepost.functional.clip_options import DualClipOptions

if TYPE_CHECKING:
    from milepost_dr_grpo.loss import DrGRPO


class DrGRPOOptions(DualClipOptions):
    """Options of Dr.GRPO."""


def build(options: DrGRPOOptions) -> DrGRPO:
    """Build the loss; torch is imported here."""
    from milepost_dr_grpo.loss import DrGRPO

    return DrGRPO(options)


@milepost.hookimpl
def milepost_algorithms() -> Iterable[Component[DrGRPO]]:
    """Provide `dr_grpo`."""
    traits = AlgorithmTraits(
        advantage="group", advantage_options={"normalize_std": False}, aggregation="constant", group=True
    )
    return [Component("dr_grpo", DrGRPOOptions, traits, build, "GRPO without deviation and length normalisation.")]
