"""milepost: reinforcement-learning post-training for language models.

The kernel knows no algorithm, reward, model or transport by name; those are plugins. What a plugin needs is here, and
is imported when it is first used: importing `milepost` alone imports neither pydantic nor torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from milepost.components import Component, NoOptions, Options
    from milepost.errors import ConfigError, MilepostError, PluginError
    from milepost.hookspecs import hookimpl
    from milepost.registry import resolve

__all__ = ["Component", "ConfigError", "MilepostError", "NoOptions", "Options", "PluginError", "hookimpl", "resolve"]
__version__ = "0.1.0"

_HOMES = {
    "Component": "components",
    "NoOptions": "components",
    "Options": "components",
    "ConfigError": "errors",
    "MilepostError": "errors",
    "PluginError": "errors",
    "hookimpl": "hookspecs",
    "resolve": "registry",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'milepost' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"milepost.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
