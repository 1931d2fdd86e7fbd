"""The `math` reward: the Math-Verify library's parsing and comparison of answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import milepost
from milepost.components import RewardComponent, RewardTraits


class MathOptions(milepost.Options):
    """Options of the `math` reward."""

    require_think: bool = False
    """A response without a closed thought (`</think>`) scores 0, whatever it answers."""
    precision: int = 6
    """Decimal digits to which values are compared."""


def _build(options: MathOptions) -> Any:
    from milepost_math.verify import MathVerify

    return MathVerify(require_think=options.require_think, precision=options.precision)


@milepost.hookimpl
def milepost_rewards() -> Iterable[RewardComponent]:
    """Provide `math`."""
    summary = "1 if Math-Verify finds the label's value in the answer, else 0."
    return [milepost.Component("math", MathOptions, RewardTraits(), _build, summary)]
