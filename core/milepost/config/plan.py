"""The plan: a run config with everything derived from it, made without starting anything.

Importing this must not import torch or numpy.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from milepost.components import ModelLayout, ModelTraits
from milepost.config import rules
from milepost.config.batch import PATHS, BatchIdentity, solve_batch
from milepost.config.choices import Choice
from milepost.config.estimates import memory_problem
from milepost.config.files import data_sources, missing_files, resolve_data, resolve_model, resolve_path
from milepost.config.loading import Loaded
from milepost.config.resolve import Resolver
from milepost.config.schema import RunConfig
from milepost.config.sources import Source, count_rows
from milepost.errors import ConfigError, MilepostError, PluginError, Problem

__all__ = ["Choice", "Plan", "make_plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """A resolved run."""

    config: RunConfig
    """The run config with every derived field filled in; paths in it are absolute."""
    origins: Mapping[str, str]
    """Dotted path to where its value came from: `default`, `FILE:LINE`, `--set` or another flag, `derived`."""
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
    eval_rewards: Mapping[str, Choice] = field(default_factory=dict)
    """Held-out set to its own reward, for those that have one; the others use `reward`."""

    @property
    def colocated(self) -> bool:
        """Whether engines and trainer take turns on the same devices."""
        return self.config.cluster.colocate

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the actor in the whole run."""
        return (self.num_rollouts - self.critic_warmup) * self.steps_per_rollout

    @property
    def converted(self) -> Path | None:
        """Folder of the policy's weights in Megatron's format, if the ranks are to read those."""
        text = self.config.model.converted
        if text is None or self.config.trainer.backend != "megatron":
            return None
        return resolve_path(text, self.base_dir)

    @property
    def critic_warmup(self) -> int:
        """Rollouts at the start that train the critic alone."""
        return self.config.critic.warmup_rollouts if self.needs_critic else 0


def make_plan(loaded: Loaded) -> Plan:
    """Derive everything a run needs from its config, or raise ConfigError with every problem.

    Reads the model's `config.json`, and counts the rows of the data where `num_epochs` asks for it. Raises
    PluginError if a component's own check fails to run.
    """
    found = rules.Findings(loaded.origin, warnings=[*loaded.notes, *loaded.registry.warnings])
    config = loaded.config
    found.problems += missing_files(config, loaded.base_dir, loaded.origin)
    model, layout = _read_model(loaded, found)
    batch = _solve_batch(config, found)
    num_rollouts = _num_rollouts(loaded, batch, found)
    roles = rules.check_roles(loaded, found)
    rules.check_role_models(loaded, model, layout.vocab_size if layout is not None else None, roles, found)
    placement = rules.check_placement(loaded, layout, model, found)
    context = rules.check_lengths(loaded, layout, found) if layout is not None else None
    rules.check_sampling(loaded, found)
    rules.check_correction(loaded, found)
    rules.check_data(loaded, found)
    rules.check_labels(loaded, found)
    rules.check_requirements(loaded, found)
    if batch is not None:
        rules.check_groups(loaded, batch, found)
    warmup = config.critic.warmup_rollouts if roles.critic else 0
    if num_rollouts is not None and warmup >= num_rollouts:
        found.problem("critic.warmup_rollouts", f"{warmup} leaves none of the {num_rollouts} rollouts to the actor")
    if batch is not None and num_rollouts is not None:
        of_critic = num_rollouts * batch.steps_per_rollout if roles.critic else None
        rules.check_optimizer(loaded, (num_rollouts - warmup) * batch.steps_per_rollout, of_critic, found)
    run_dir = resolve_path(config.run.dir or f"runs/{loaded.name}", loaded.base_dir)
    # What may not even be looked at (a name that is too long) is told when the folder is made.
    with suppress(OSError):
        if run_dir.exists() and not run_dir.is_dir():
            found.problem("run.dir", f"{run_dir} is a file; expected a folder, or nothing yet")
    if found.problems or model is None or layout is None or batch is None or num_rollouts is None or context is None:
        raise ConfigError(found.problems)
    resolved = Resolver(loaded, run_dir).resolve(
        batch=batch,
        num_rollouts=num_rollouts,
        num_engines=placement.num_engines,
        context=context,
        recipe=model.name,
        roles=roles,
    )
    plan = Plan(
        config=resolved.config,
        origins=resolved.origins,
        run_dir=run_dir,
        base_dir=loaded.base_dir,
        algorithm=loaded.choices["algorithm"],
        advantage=loaded.choices["advantage"],
        reward=loaded.choices["reward"],
        model=model,
        transport=loaded.choices["transport"],
        layout=layout,
        model_path=resolve_model(config.model.path, loaded.base_dir),
        num_rollouts=num_rollouts,
        batch_size=batch.batch_size,
        samples_per_prompt=batch.samples_per_prompt,
        global_batch_size=batch.global_batch_size,
        steps_per_rollout=batch.steps_per_rollout,
        world_size=placement.world_size,
        data_parallel=placement.data_parallel,
        needs_critic=roles.critic,
        needs_reference=roles.reference,
        needs_teacher=roles.teacher,
        warnings=tuple(found.warnings),
        eval_rewards={
            dataset.name: loaded.choices[path]
            for index, dataset in enumerate(config.eval.datasets)
            if (path := f"eval.datasets.{index}.reward") in loaded.choices
        },
    )
    _ask_components(plan, loaded)
    problem = memory_problem(plan)
    return plan if problem is None else replace(plan, warnings=(*plan.warnings, str(problem)))


def _ask_components(plan: Plan, loaded: Loaded) -> None:
    """Let every component say what it cannot work with."""
    problems = []
    for path, choice in loaded.choices.items():
        check = getattr(choice.component.traits, "check", None)
        if check is None:
            continue
        try:
            messages = list(check(plan, choice.options))
        except Exception as error:
            shown = traceback.format_exc().rstrip()
            raise PluginError(f"the check of {choice.name!r} from {choice.distribution} failed.\n{shown}") from error
        problems += [Problem(path, message, loaded.origin(path)) for message in messages]
    if problems:
        raise ConfigError(problems)


def _read_model(loaded: Loaded, found: rules.Findings) -> tuple[Choice | None, ModelLayout | None]:
    """Read the checkpoint's `config.json` and find the recipe that serves its architecture."""
    section = loaded.config.model
    if any(problem.path == "model.path" for problem in found.problems):
        # Reported with the other missing files.
        return None, None
    path = resolve_model(section.path, loaded.base_dir) / "config.json"
    try:
        model_config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        found.problem("model.path", f"{path} cannot be read: {error.strerror or error}")
        return None, None
    except ValueError as error:
        found.problem("model.path", f"{path} is not JSON: {error}")
        return None, None
    architectures = model_config.get("architectures") if isinstance(model_config, dict) else None
    if not (isinstance(architectures, list) and architectures and isinstance(architectures[0], str)):
        found.problem("model.path", f'{path} names no architecture; expected "architectures": ["Qwen3ForCausalLM"]')
        return None, None
    try:
        provided = loaded.registry.for_architecture(architectures[0], override=section.recipe)
    except PluginError as error:
        found.problem("model.recipe" if section.recipe else "model.path", str(error))
        return None, None
    try:
        choice = Choice(provided.component, provided.component.options(), provided.origin)
    except ValidationError:
        found.problem("model.recipe", f"recipe {provided.component.name!r} has options without default; it needs none")
        return None, None
    try:
        return choice, cast("ModelTraits", provided.component.traits).layout(model_config)
    except (ValueError, KeyError, TypeError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        found.problem("model.path", f"recipe {choice.name!r} cannot read {path}: {what}")
        return choice, None


def _solve_batch(config: RunConfig, found: rules.Findings) -> BatchIdentity | None:
    rollout, trainer = config.rollout, config.trainer
    solved = solve_batch(
        rollout.batch_size, rollout.samples_per_prompt, trainer.global_batch_size, trainer.steps_per_rollout
    )
    if isinstance(solved, BatchIdentity):
        return solved
    given = [path for path in PATHS.values() if found.origin(path)]
    origin = ", ".join(dict.fromkeys(found.origin(path) for path in given))
    found.problems.append(Problem(solved.path, solved.message, origin))
    return None


def _num_rollouts(loaded: Loaded, batch: BatchIdentity | None, found: rules.Findings) -> int | None:
    """Return the number of rollouts: given, or as many as it takes to pass over the data num_epochs times."""
    rollout, data = loaded.config.rollout, loaded.config.data
    if rollout.num_epochs is None:
        if rollout.num_rollouts is None:
            found.problem("rollout.num_rollouts", "required, but not given: give rollout.num_rollouts or num_epochs")
        return rollout.num_rollouts
    if batch is None:
        return None
    counted = _count_rows(loaded, found)
    if not counted:
        return None
    rows = sum(counted.values())
    # What all epochs take of each source: with weights, more or less than its rows.
    prompts = sum(int(rollout.num_epochs * source.weight * number) for source, number in counted.items())
    total = -(-prompts // batch.batch_size)
    weighted = " (weighted)" if any(source.weight != 1 for source in counted) else ""
    if rollout.num_rollouts is not None and rollout.num_rollouts != total:
        found.problem(
            "rollout.num_epochs",
            f"{rollout.num_epochs} epochs of {rows} rows{weighted} at {batch.batch_size} prompts a rollout are {total} "
            f"rollouts, but rollout.num_rollouts is {rollout.num_rollouts}; give one of them",
        )
        return None
    if data.dedupe or data.max_prompt_len is not None:
        found.warn(
            "rollout.num_epochs",
            f"counts all {rows} rows; where dedupe or max_prompt_len drop some, it passes over the rest more often",
        )
    return total


def _count_rows(loaded: Loaded, found: rules.Findings) -> dict[Source, int]:
    """Return the rows of each training source; empty, with the problem recorded, if one is missing or has none."""
    counted: dict[Source, int] = {}
    for path, source in data_sources({"data": loaded.config.data}):
        place = resolve_data(source.place, loaded.base_dir)
        if not (place.is_file() or place.is_dir()):
            return {}
        try:
            number = count_rows(place, source)
        except MilepostError as error:
            message = error.problems[0].message if isinstance(error, ConfigError) else str(error)
            found.problem(path, message)
            return {}
        if number == 0:
            found.problem(path, f"{source.text} is empty; expected at least one row")
            return {}
        counted[source] = counted.get(source, 0) + number
    return counted
