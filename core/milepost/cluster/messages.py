"""A plan as plain data, and back: how another process learns what it is part of.

Components are named, never sent: the other process finds (kind, name) among its own plugins and validates the options
again, after it has made sure that its plugins are the controller's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from milepost import registry
from milepost.components import KINDS, Kind, ModelLayout
from milepost.config.choices import Choice
from milepost.config.plan import Plan
from milepost.config.schema import RunConfig
from milepost.errors import PluginError

_PLAIN = frozenset(field.name for field in fields(Plan)) - {*KINDS, "config", "layout", "eval_rewards"}


@dataclass(frozen=True, slots=True)
class PlanMessage:
    """A plan without objects, and the plugins it was made with."""

    config: Mapping[str, Any]
    layout: Mapping[str, Any]
    plain: Mapping[str, Any]
    """Fields of the plan that are plain data already."""
    choices: Mapping[Kind, tuple[str, Mapping[str, Any]]]
    """Kind to (name, options)."""
    eval_rewards: Mapping[str, tuple[str, Mapping[str, Any]]]
    settings: Mapping[str, Any]
    """What `Registry.load` makes the controller's registry from."""
    distributions: Mapping[str, str]
    """The controller's plugin distributions and their versions."""

    @classmethod
    def of(cls, plan: Plan) -> PlanMessage:
        """Take a plan of this process apart."""
        here = registry.current()
        return cls(
            config=plan.config.model_dump(),
            layout=asdict(plan.layout),
            plain={name: getattr(plan, name) for name in _PLAIN},
            choices={kind: _named(getattr(plan, kind)) for kind in KINDS},
            eval_rewards={name: _named(choice) for name, choice in plan.eval_rewards.items()},
            settings=here.settings,
            distributions=here.distributions(),
        )

    def restore(self, where: str) -> Plan:
        """Load this process's plugins and return the plan; `where` names the process in messages.

        Raises PluginError if the plugins here are not the controller's, listing every difference.
        """
        here = registry.Registry.load(**self.settings)
        differences = here.differences(self.distributions)
        if differences:
            listing = "\n".join(f"  {difference}" for difference in differences)
            raise PluginError(
                f"the plugins of {where} are not the controller's (there), so the two would not run the same code; "
                f"install the same everywhere:\n{listing}"
            )
        registry.use(here)
        choices: dict[str, Any] = {kind: _choice(kind, *named) for kind, named in self.choices.items()}
        return Plan(
            config=RunConfig.model_validate(self.config),
            layout=ModelLayout(**self.layout),
            eval_rewards={name: _choice("reward", *named) for name, named in self.eval_rewards.items()},
            **choices,
            **self.plain,
        )


@dataclass(frozen=True, slots=True)
class Setup:
    """What every process of a run is told first."""

    name: str
    """ROLE-RANK, as its log is called."""
    run_dir: Path
    threads: int
    """CPU threads it may compute with."""


def _named(choice: Choice) -> tuple[str, Mapping[str, Any]]:
    return choice.name, choice.options.model_dump()


def _choice(kind: Kind, name: str, options: Mapping[str, Any]) -> Choice:
    provided = registry.current().get(kind, name)
    return Choice(provided.component, provided.component.options.model_validate(dict(options)), provided.origin)
