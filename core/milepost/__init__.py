"""milepost: reinforcement-learning post-training for language models.

The kernel knows no algorithm, reward, model or transport by name; those are plugins. What a plugin needs is here;
importing `milepost` imports neither torch nor numpy.
"""

from milepost.components import Component, NoOptions, Options
from milepost.errors import ConfigError, MilepostError, PluginError
from milepost.hookspecs import hookimpl
from milepost.registry import resolve

__all__ = ["Component", "ConfigError", "MilepostError", "NoOptions", "Options", "PluginError", "hookimpl", "resolve"]
__version__ = "0.1.0"
