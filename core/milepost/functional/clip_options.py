"""Options of algorithms with a clipped ratio. Imports no torch: a plugin's entry point may import this."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from milepost.components import Options


class ClipOptions(Options):
    """How far the probability ratio counts; an algorithm overrides a default by declaring the field again."""

    eps_clip: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    """How far under 1 the probability ratio counts."""
    eps_clip_high: Annotated[float, Field(ge=0.0)] | None = None
    """How far over 1 the ratio counts; default eps_clip."""

    @property
    def high(self) -> float:
        """How far over 1 the ratio counts."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high


class DualClipOptions(ClipOptions):
    """The same, with the dual clip (arXiv 1912.09729)."""

    dual_clip: Annotated[float, Field(gt=1.0)] | None = None
    """Bounds the loss of a token with negative advantage to this many times it; null turns it off."""
