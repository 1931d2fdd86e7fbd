"""The `deepscaler` reward: is the boxed answer behind the thought the right one, by rules.

Behaves as the reward published with DeepScaleR (github.com/agentica-project/rllm), written anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import milepost
from milepost.components import RewardComponent, RewardTraits


class DeepscalerOptions(milepost.Options):
    """Options of the `deepscaler` reward."""

    require_think: bool = True
    """A response without a closed thought (`</think>`) scores 0, whatever it answers."""


def _build(options: DeepscalerOptions) -> Any:
    from milepost_deepscaler.grading import Deepscaler

    return Deepscaler(require_think=options.require_think)


@milepost.hookimpl
def milepost_rewards() -> Iterable[RewardComponent]:
    """Provide `deepscaler`."""
    summary = "1 if the last \\boxed{} after the thought equals the label, else 0."
    return [milepost.Component("deepscaler", DeepscalerOptions, RewardTraits(), _build, summary)]
