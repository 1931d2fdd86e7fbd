"""A plain function as a reward."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

from milepost.errors import PluginError
from milepost.samples import Sample

Function = Callable[[Any], Any]


def load_function(spec: str) -> Function:
    """Return the function that `module:function` names.

    Raises PluginError if the module cannot be found or has no such function; what the module itself raises while it is
    imported comes through as it is.
    """
    module_name, _, attributes = spec.partition(":")
    try:
        value: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise PluginError(
            f"reward.function {spec!r}: no module {error.name!r}; put it beside the run config or install it"
        ) from error
    path = module_name
    for attribute in attributes.split("."):
        if not hasattr(value, attribute):
            names = sorted(name for name, item in vars(value).items() if callable(item) and not name.startswith("_"))
            raise PluginError(
                f"reward.function {spec!r}: {path} has no {attribute!r}; it has {', '.join(names) or 'no functions'}"
            )
        value = getattr(value, attribute)
        path = f"{path}.{attribute}"
    if not callable(value):
        raise PluginError(f"reward.function {spec!r}: {path} is a {type(value).__name__}, not a function")
    function: Function = value
    return function


def make_reward(spec: str, scope: Literal["sample", "group"]) -> Any:
    """Return a reward that calls the function `module:function`, on a sample or on a group; async where it is async."""
    function = load_function(spec)
    asynchronous = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an instance whose call is async
    )
    if scope == "group":
        return AsyncGroupFunction(function) if asynchronous else GroupFunction(function)
    return AsyncSampleFunction(function) if asynchronous else SampleFunction(function)


class SampleFunction:
    """Calls a function with one sample."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def score(self, sample: Sample) -> Any:
        """Return what the function makes of the sample; the kernel checks it."""
        return self._function(sample)


class AsyncSampleFunction:
    """Awaits a coroutine function with one sample; calls may overlap."""

    def __init__(self, function: Callable[[Any], Awaitable[Any]]) -> None:
        self._function = function

    async def score(self, sample: Sample) -> Any:
        """Return what the function makes of the sample; the kernel checks it."""
        return await self._function(sample)


class GroupFunction:
    """Calls a function with all samples of a prompt."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def score_group(self, samples: Sequence[Sample]) -> Any:
        """Return what the function makes of the group; the kernel checks it."""
        return self._function(samples)


class AsyncGroupFunction:
    """Awaits a coroutine function with all samples of a prompt; calls may overlap."""

    def __init__(self, function: Callable[[Any], Awaitable[Any]]) -> None:
        self._function = function

    async def score_group(self, samples: Sequence[Sample]) -> Any:
        """Return what the function makes of the group; the kernel checks it."""
        return await self._function(samples)
