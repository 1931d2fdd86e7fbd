"""The `python` reward: a function of yours, named `module:function`, without a plugin around it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import milepost
from milepost.components import RewardComponent, RewardTraits
from pydantic import Field


class PythonOptions(milepost.Options):
    """Options of the `python` reward."""

    function: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")]
    """`module:function`; the module lies beside the run config or can be imported. The function may be `async`."""
    scope: Literal["sample", "group"] = "sample"
    """What it is called with: one sample, or the list of all samples of one prompt."""


def _build(options: PythonOptions) -> Any:
    from milepost_python.function import make_reward

    return make_reward(options.function, options.scope)


@milepost.hookimpl
def milepost_rewards() -> Iterable[RewardComponent]:
    """Provide `python`."""
    traits = RewardTraits(needs_label=False)
    return [milepost.Component("python", PythonOptions, traits, _build, "Your own function, by module:function.")]
