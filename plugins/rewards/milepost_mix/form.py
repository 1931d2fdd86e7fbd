"""The form of a response as a reward."""

from __future__ import annotations

import re

from milepost.samples import Sample

from milepost_mix import FormatOptions


class FormatReward:
    """Scores whether a pattern is found in a response."""

    def __init__(self, options: FormatOptions) -> None:
        self.options = options
        self._pattern = re.compile(options.pattern, re.DOTALL)

    def score(self, sample: Sample) -> float:
        """Return `right` or `wrong`."""
        text, limit = sample.text, self.options.max_chars
        if len(text) > 2 * limit:
            text = text[:limit] + text[-limit:]
        return self.options.right if self._pattern.search(text) else self.options.wrong
