"""Small plugins for tests, and a folder to install them in."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from importlib.metadata import EntryPoint, distributions
from pathlib import Path
from typing import Any

from milepost.registry import Registry

REWARD = """
    import milepost
    from milepost.components import RewardTraits

    class Options(milepost.Options):
        scale: float = 1.0
        \"\"\"What the score is multiplied by.\"\"\"

    class Constant:
        def __init__(self, scale):
            self.scale = scale

        def score(self, sample):
            return self.scale

    @milepost.hookimpl
    def milepost_rewards():
        build = lambda options: Constant(options.scale)
        return [milepost.Component("NAME", Options, RewardTraits(), build, "Always the same.")]
"""
MODEL = """
    import milepost
    from milepost.components import ModelTraits

    @milepost.hookimpl
    def milepost_models():
        traits = ModelTraits(ARCHITECTURES, lambda config: None, lambda layout, length: 0.0)
        return [milepost.Component("NAME", milepost.NoOptions, traits, lambda options: "NAME built", "A recipe.")]
"""


class Site:
    """A folder of real, small distributions, like site-packages."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.modules: list[str] = []

    def install(self, distribution: str, plugins: dict[str, str], version: str = "1.0") -> None:
        """Write a distribution whose plugins are given as entry-point name to module source."""
        stem = distribution.replace("-", "_")
        lines = ["[milepost]"]
        for name, source in plugins.items():
            module = re.sub(r"\W", "_", f"plugin_{stem}_{name}_{self.folder}")
            self.modules.append(module)
            (self.folder / f"{module}.py").write_text(textwrap.dedent(source))
            lines.append(f"{name} = {module}")
        info = self.folder / f"{stem}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")

    def discover(self) -> Iterable[EntryPoint]:
        """Return the entry points of these distributions alone."""
        return [
            entry
            for found in distributions(path=[str(self.folder)])
            for entry in found.entry_points
            if entry.group == "milepost"
        ]

    def load(self, **settings: Any) -> Registry:
        return Registry.load(discover=self.discover, **settings)


def reward(name: str) -> str:
    return REWARD.replace("NAME", name)


def model(name: str, *architectures: str) -> str:
    return MODEL.replace("NAME", name).replace("ARCHITECTURES", repr(architectures))


def states(registry: Registry) -> dict[str, str]:
    return {record.label: record.state for record in registry.plugins}
