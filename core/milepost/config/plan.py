"""The plan: a run config with everything derived from it, made without starting anything.

Importing this must not import torch or numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.components import Component, ModelLayout
from milepost.config.schema import RunConfig


@dataclass(frozen=True, slots=True)
class Choice:
    """A component chosen for the run, with its validated options."""

    component: Component[Any]
    options: Any
    distribution: str
    """Distribution and version it comes from, or `local:FILE (hash)`."""

    @property
    def name(self) -> str:
        """The component's name."""
        return self.component.name

    def build(self) -> Any:
        """Build the component."""
        return self.component.build(self.options)


@dataclass(frozen=True, slots=True)
class Plan:
    """A resolved run."""

    config: RunConfig
    """The run config with every derived field filled in."""
    origins: Mapping[str, str]
    """Dotted path to where its value came from: `default`, `FILE:LINE`, `--set`, `derived`."""
    run_dir: Path
    base_dir: Path
    """Folder relative paths are taken from: the last run config's."""
    algorithm: Choice
    advantage: Choice
    reward: Choice
    model: Choice
    transport: Choice
    layout: ModelLayout
    model_path: Path
    num_rollouts: int
    batch_size: int
    """Prompts per rollout."""
    samples_per_prompt: int
    global_batch_size: int
    """Rollouts (sequences, without fan-out) per optimizer step."""
    steps_per_rollout: int
    world_size: int
    data_parallel: int
    needs_critic: bool
    needs_reference: bool
    needs_teacher: bool
    warnings: tuple[str, ...] = ()
    """Things a user should know before starting."""
