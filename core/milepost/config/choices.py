"""Components chosen by a run config: looked up by name, their options validated by their own models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from pydantic import BaseModel

from milepost.components import AlgorithmTraits, Component, Kind
from milepost.config.documents import join
from milepost.config.messages import Validator
from milepost.config.schema import ClusterSection, ComponentSection, RunConfig
from milepost.errors import PluginError
from milepost.registry import Registry


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


def kernel_keys(section: type[ComponentSection]) -> frozenset[str]:
    """Return the keys of a component section that are the kernel's, `name` included."""
    return frozenset(section.model_fields)


def component_sections() -> dict[str, type[ComponentSection]]:
    """Return the top-level sections that name a component."""
    sections = {}
    for name, field in RunConfig.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, ComponentSection):
            sections[name] = field.annotation
    return sections


class Chooser:
    """Looks the components of a run config up, section by section."""

    def __init__(self, registry: Registry, validator: Validator) -> None:
        self.registry = registry
        self.validator = validator
        self.chosen: dict[str, Choice] = {}
        """Dotted path of the section to the component chosen there."""
        self.derived: set[str] = set()
        """Dotted paths of names and options that nothing in the run config gave."""

    def choose(self, sections: Mapping[str, BaseModel]) -> None:
        """Choose for all sections that are valid by themselves; problems are recorded with the validator."""
        algorithm = sections.get("algorithm")
        if isinstance(algorithm, ComponentSection):
            self._choose("algorithm", algorithm, algorithm.options, name=None)
        advantage = sections.get("advantage")
        if isinstance(advantage, ComponentSection) and "algorithm" in self.chosen:
            self._advantage(advantage)
        reward = sections.get("reward")
        if isinstance(reward, ComponentSection):
            self._choose("reward", reward, reward.options, name=None)
        transport, cluster = sections.get("transport"), sections.get("cluster")
        if isinstance(transport, ComponentSection) and isinstance(cluster, ClusterSection):
            default = "ipc" if cluster.colocate else "broadcast"
            self._choose("transport", transport, transport.options, name=default)
        for index, dataset in enumerate(getattr(sections.get("eval"), "datasets", ())):
            if dataset.reward is not None:
                path = f"eval.datasets.{index}.reward"
                self._choose(path, dataset.reward, dataset.reward.options, name=None)

    def _advantage(self, section: ComponentSection) -> None:
        """Choose the estimator: the one named, or the algorithm's own with the algorithm's options for it."""
        algorithm = self.chosen["algorithm"]
        traits = algorithm.component.traits
        assert isinstance(traits, AlgorithmTraits)
        given = section.options
        defaults: Mapping[str, Any] = {}
        if getattr(section, "name", None) in (None, traits.advantage):
            defaults = traits.advantage_options
        self.derived |= {join("advantage", key) for key in defaults if key not in given}
        reason = f" (estimator {traits.advantage!r} is the default of algorithm {algorithm.name!r})"
        named = getattr(section, "name", None) is not None
        self._choose(
            "advantage", section, {**defaults, **given}, name=traits.advantage, inherited="" if named else reason
        )

    def _choose(
        self, path: str, section: ComponentSection, options: Mapping[str, Any], *, name: str | None, inherited: str = ""
    ) -> None:
        kind = cast("Kind", section.kind)
        given: str | None = getattr(section, "name", None)
        wanted = given or name
        assert wanted is not None
        if given is None:
            self.derived.add(join(path, "name"))
        try:
            provided = self.registry.get(kind, wanted)
        except PluginError as error:
            self.validator.report(join(path, "name"), f"{error}{inherited}")
            return
        model = provided.component.options
        validated = self.validator.validate(
            model, dict(options), path, known=kernel_keys(type(section)), inherited=inherited or _whose(kind, wanted)
        )
        if validated is not None:
            self.chosen[path] = Choice(provided.component, validated, provided.origin)


def _whose(kind: str, name: str) -> str:
    return f" (options of {kind} {name!r})"


def resolved_options(choice: Choice, taken: Iterable[str]) -> dict[str, Any]:
    """Return a component's options as plain data, defaults included, without kernel keys (`taken`)."""
    options: BaseModel = choice.options
    plain = options.model_dump(mode="json")
    return {key: value for key, value in plain.items() if key not in set(taken)}
