"""Filling in what a run config leaves open, and keeping account of where every value came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from milepost.components import AlgorithmTraits
from milepost.config.batch import BatchIdentity
from milepost.config.choices import component_sections, kernel_keys, resolved_options
from milepost.config.documents import leaves
from milepost.config.files import FOLDERS, MODEL_FOLDERS, resolve_data, resolve_model, resolve_path
from milepost.config.loading import Loaded
from milepost.config.rules import Roles
from milepost.config.schema import DatasetFields, EvalDataset, RewardSection, RunConfig
from milepost.config.sources import DataPath, relocated

DERIVED = "derived"

_ACTOR_FALLBACKS = ("lr", "weight_decay", "schedule", "warmup_steps", "min_lr", "clip_grad")
"""Fields of the critic that default to the actor's."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """A run config with nothing left open, and the origin of every value in it."""

    config: RunConfig
    origins: Mapping[str, str]


class Resolver:
    """Derives the open fields of one loaded run config."""

    def __init__(self, loaded: Loaded, run_dir: Path) -> None:
        self.loaded = loaded
        self.run_dir = run_dir
        self.updates: dict[str, dict[str, Any]] = {}
        self.derived: set[str] = set(loaded.derived)

    def resolve(
        self, *, batch: BatchIdentity, num_rollouts: int, num_engines: int, context: int, recipe: str, roles: Roles
    ) -> Resolved:
        """Return the config with derived fields filled in and paths made absolute."""
        config = self.loaded.config
        optimizer = config.optimizer
        warmup = config.critic.warmup_rollouts if roles.critic else 0
        algorithm = cast("AlgorithmTraits", self.loaded.choices["algorithm"].component.traits)
        self._fill("run.dir", str(self.run_dir))
        self._update("run.dir", str(self.run_dir))
        self._fill("model.recipe", recipe)
        self._fill("rollout.batch_size", batch.batch_size)
        self._fill("rollout.samples_per_prompt", batch.samples_per_prompt)
        self._fill("trainer.global_batch_size", batch.global_batch_size)
        self._fill("trainer.steps_per_rollout", batch.steps_per_rollout)
        self._fill("rollout.num_rollouts", num_rollouts)
        self._fill("rollout.max_context_len", context)
        # Longer ones could never be generated from: an engine refuses them, which would end the run.
        self._fill("data.max_prompt_len", context - 1)
        self._fill("engine.num_engines", num_engines)
        self._fill("algorithm.aggregation", algorithm.aggregation)
        self._fill("optimizer.decay_steps", (num_rollouts - warmup) * batch.steps_per_rollout)
        if roles.reference:
            self._fill("reference.path", config.model.path)
        if roles.critic:
            self._fill("critic.init_from", config.model.path)
            for key in _ACTOR_FALLBACKS:
                self._fill(f"critic.{key}", getattr(optimizer, key))
            self._fill("critic.decay_steps", optimizer.decay_steps or num_rollouts * batch.steps_per_rollout)
        self._absolute_paths()
        for name, section in component_sections().items():
            choice = self.loaded.choices[name]
            self._fill(f"{name}.name", choice.name)
            self.updates.setdefault(name, {}).update(resolved_options(choice, kernel_keys(section)))
        self.updates["eval"] = {"datasets": tuple(map(self._dataset, range(len(config.eval.datasets))))}
        sections: dict[str, BaseModel] = {name: getattr(config, name) for name in type(config).model_fields}
        for name, update in self.updates.items():
            sections[name] = sections[name].model_copy(update=update)
        resolved = config.model_copy(update=sections)
        return Resolved(resolved, {path: self._origin(path) for path, _ in leaves(resolved.model_dump())})

    def _update(self, path: str, value: Any) -> None:
        section, _, key = path.partition(".")
        self.updates.setdefault(section, {})[key] = value

    def _fill(self, path: str, value: Any) -> None:
        """Give a field its derived value if the run config left it open."""
        section, _, key = path.partition(".")
        if getattr(getattr(self.loaded.config, section), key) is None:
            self._update(path, value)
            self.derived.add(path)

    def _absolute_paths(self) -> None:
        config, base_dir = self.loaded.config, self.loaded.base_dir
        for path in FOLDERS:
            section, _, key = path.partition(".")
            text = self.updates.get(section, {}).get(key, getattr(getattr(config, section), key))
            if text is not None:
                resolve = resolve_model if path in MODEL_FOLDERS else resolve_path
                self._update(path, str(resolve(text, base_dir)))
        self._update("data.path", self._data_path(config.data.path))

    def _data_path(self, path: DataPath) -> DataPath:
        return relocated(path, lambda place: resolve_data(place, self.loaded.base_dir))

    def _dataset(self, index: int) -> EvalDataset:
        """Return a held-out set with what it does not say taken from the training data and rollout."""
        config = self.loaded.config
        dataset = config.eval.datasets[index]
        path = f"eval.datasets.{index}"
        update: dict[str, Any] = {"path": self._data_path(dataset.path)}
        for key in DatasetFields.model_fields:
            if key not in dataset.model_fields_set:
                update[key] = self.updates["data"].get(key, getattr(config.data, key))
                if update[key] != getattr(dataset, key):
                    self.derived.add(f"{path}.{key}")
        if dataset.max_response_len is None:
            update["max_response_len"] = config.rollout.max_response_len
            self.derived.add(f"{path}.max_response_len")
        if dataset.reward is not None:
            options = resolved_options(self.loaded.choices[f"{path}.reward"], kernel_keys(RewardSection))
            update["reward"] = dataset.reward.model_copy(update=options)
        return dataset.model_copy(update=update)

    def _origin(self, path: str) -> str:
        above = path
        while above:
            if above in self.derived:
                return DERIVED
            above = above.rpartition(".")[0]
        return self.loaded.origins.get(path, self.loaded.origin(path) or "default")
