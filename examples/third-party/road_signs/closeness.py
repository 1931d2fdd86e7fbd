"""A dense reward for numeric answers."""

from __future__ import annotations

import math
import re

from milepost.samples import Sample

NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?(?!\d)")
TAIL = 2000
"""Characters at the end of a response in which a number is looked for."""


class Closeness:
    """scale / (scale + |x - label|), x the last number of the response; 0 without one."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def score(self, sample: Sample) -> dict[str, float]:
        """Return `reward`, from 0 to 1, and `answered`, whether there was a number.

        Raises ValueError if the label is no finite number.
        """
        label = float(sample.task.label)
        if not math.isfinite(label):
            raise ValueError(f"closeness needs a finite number as label, given {sample.task.label!r}")
        numbers = NUMBER.findall(sample.text[-TAIL:])
        if not numbers:
            return {"reward": 0.0, "answered": 0.0}
        return {"reward": self.scale / (self.scale + abs(float(numbers[-1]) - label)), "answered": 1.0}
