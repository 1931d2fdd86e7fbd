"""A run config or plan as text to read and as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import yaml

from milepost.config.estimates import Estimates, estimate, training_load
from milepost.config.memory import RECOMPUTE_COST, Cut, rank_memory
from milepost.config.plan import Plan
from milepost.config.refill import refill_text
from milepost.config.schema import RunConfig

_VALUE_WIDTH = 44
"""Values longer than this do not push the origins of all others aside."""


def config_data(config: RunConfig) -> dict[str, Any]:
    """Return a run config as plain data; loading it again gives the same run config."""
    return config.model_dump(mode="json")


def flow(value: Any) -> str:
    """Return a value as one line of YAML that reads back as the same value."""
    if isinstance(value, str):
        # JSON strings are YAML strings; plain text is easier on the eye where it cannot be mistaken.
        plain = value.replace("/", "").replace("_", "").replace("-", "").replace(".", "")
        starts_as_text = value[:1].isalpha() or value[:1] in "/_"
        reserved = value.lower() in {"null", "true", "false", "on", "off", "yes", "no", "y", "n"}
        if plain.isalnum() and starts_as_text and not reserved:
            return value
        return json.dumps(value, ensure_ascii=False)
    dumped: str = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True)
    return dumped.removesuffix("\n").removesuffix("\n...")


def config_lines(config: RunConfig, origins: Mapping[str, str]) -> Iterable[str]:
    """Yield the run config as YAML, the origin of every value as a comment behind it."""
    yield from _mapping_lines(config_data(config), origins, "", 0)


def _mapping_lines(data: Mapping[str, Any], origins: Mapping[str, str], path: str, depth: int) -> Iterable[str]:
    for key, value in data.items():
        below = f"{path}.{key}" if path else key
        head = f"{'  ' * depth}{flow(key)}:"
        if isinstance(value, Mapping) and value:
            yield head
            yield from _mapping_lines(value, origins, below, depth + 1)
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield head
            for index, item in enumerate(value):
                lines = _mapping_lines(item, origins, f"{below}.{index}", depth + 2)
                for number, line in enumerate(lines):
                    start = 2 * (depth + 1)
                    yield f"{line[:start]}- {line[start + 2 :]}" if number == 0 else line
        else:
            origin = origins.get(below, "default")
            yield f"{head} {flow(value)}".ljust(_VALUE_WIDTH) + f"  # {origin}"


def plan_data(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain data: config, origins, components, what was derived, estimates, warnings."""
    choices = {name: getattr(plan, name) for name in ("algorithm", "advantage", "reward", "model", "transport")}
    choices |= {f"eval.{name}.reward": choice for name, choice in plan.eval_rewards.items()}
    return {
        "config": config_data(plan.config),
        "origins": dict(plan.origins),
        "components": {
            place: {"name": choice.name, "distribution": choice.distribution} for place, choice in choices.items()
        },
        "derived": {
            "run_dir": str(plan.run_dir),
            "base_dir": str(plan.base_dir),
            "model_path": str(plan.model_path),
            "num_rollouts": plan.num_rollouts,
            "num_steps": plan.num_steps,
            "batch_size": plan.batch_size,
            "samples_per_prompt": plan.samples_per_prompt,
            "global_batch_size": plan.global_batch_size,
            "steps_per_rollout": plan.steps_per_rollout,
            "world_size": plan.world_size,
            "data_parallel": plan.data_parallel,
            "num_engines": plan.config.engine.num_engines,
            "needs_critic": plan.needs_critic,
            "needs_reference": plan.needs_reference,
            "needs_teacher": plan.needs_teacher,
        },
        "layout": asdict(plan.layout),
        "estimates": asdict(estimate(plan)),
        "warnings": list(plan.warnings),
    }


def plan_text(plan: Plan) -> str:
    """Return a plan to read: every value with its origin, then what follows from them."""
    lines = [*config_lines(plan.config, plan.origins), "", *_summary(plan)]
    notes = [f"warning: {warning}" for warning in plan.warnings]
    lines += ["", *notes] if notes else []
    return "\n".join(lines)


def _summary(plan: Plan) -> list[str]:
    cost = estimate(plan)
    layout = plan.layout
    engines = plan.config.engine.num_engines or 1
    roles = ["actor"] + [name for name in ("critic", "reference", "teacher") if getattr(plan, f"needs_{name}")]
    experts = f", {layout.num_experts} experts" if layout.num_experts else ""
    rows: list[tuple[str, str]] = [
        ("run folder", str(plan.run_dir)),
        (
            "batch",
            f"{plan.batch_size} prompts x {plan.samples_per_prompt} samples = {plan.global_batch_size} rollouts a step "
            f"x {_count(plan.steps_per_rollout, 'step')}",
        ),
        ("length", f"{_count(plan.num_rollouts, 'rollout')}, {_count(plan.num_steps, 'optimizer step')}"),
        ("roles", ", ".join(roles)),
        (
            "placement",
            f"{_count(plan.world_size, 'training rank')} ({plan.data_parallel} data-parallel), "
            f"{_count(engines, 'engine')} {'on the same devices' if plan.colocated else 'on devices of their own'}, "
            f"{plan.config.cluster.launcher}",
        ),
        (
            "model",
            f"{quantity(layout.num_parameters, giga='B')} parameters, {_count(layout.num_layers, 'layer')} of "
            f"{layout.hidden_size}{experts}, vocabulary {layout.vocab_size}",
        ),
    ]
    for place in ("model", "algorithm", "advantage", "reward", "transport"):
        choice = getattr(plan, place)
        rows.append(("recipe" if place == "model" else place, f"{choice.name}, from {choice.distribution}"))
    rows += [
        *_memory_rows(plan, cost),
        ("engine memory", f"about {binary(cost.engine_weights)} of weights a device; its cache comes on top"),
        (
            "arithmetic",
            f"at most {quantity(cost.flops_per_sample)} FLOP to train on a sample, "
            f"{quantity(cost.flops_per_rollout)} FLOP on a rollout, prompts aside",
        ),
    ]
    if plan.config.engine.backend == "sglang":
        rows.append(("a lost engine", refill_text(plan)))
    if cost.host_per_rank:
        ranks = -(-plan.world_size // plan.config.cluster.nodes)
        each = f" a machine, {binary(cost.host_per_rank)} for each of {ranks} ranks" if ranks > 1 else ""
        text = f"about {binary(cost.host_per_rank * ranks)}{each}: what is not on a device at the moment"
        rows.append(("host memory", text))
    return table(rows)


def _memory_rows(plan: Plan, cost: Estimates) -> list[tuple[str, str]]:
    """What the trainer holds on a device."""
    parts = f"weights {binary(cost.weights)} + gradients {binary(cost.gradients)} + optimizer {binary(cost.optimizer)}"
    if cost.peak is None or cost.activations is None or cost.workspace is None:
        total = (cost.weights + cost.gradients + cost.optimizer) * cost.trained_roles
        trained = f" x {cost.trained_roles} roles" if cost.trained_roles > 1 else ""
        text = f"about {binary(total)} a rank in {cost.dtype}: {parts}{trained}; activations come on top"
        return [("memory", text)]
    trainer = plan.config.trainer
    cut, load = Cut.of(trainer, plan.data_parallel), training_load(plan)
    spread = [
        f"{size} {name}"
        for name, size in (
            ("tensor-parallel" + (" with its sequence split" if cut.sequence else ""), cut.tensor),
            (f"pipeline stages of {cut.virtual} pieces" if cut.virtual > 1 else "pipeline stages", cut.pipeline),
            ("context-parallel", cut.context),
            ("expert-parallel", cut.expert),
        )
        if size > 1
    ]
    copies = cut.data * cut.context
    spread.append(f"{cut.data} data-parallel, optimizer over {copies}" if load.adam else f"{cut.data} data-parallel")
    if load.trained_roles > 1:
        parts = f"({parts}) x {load.trained_roles} roles"
    others = {
        name: rank_memory(plan.layout, replace(cut, recompute=name), load).total
        for name in RECOMPUTE_COST
        if name != cut.recompute
    }
    per_row = f", {trainer.max_tokens_per_gpu * cut.context} over its context-parallel ranks" if cut.context > 1 else ""
    return [
        ("parallelism", " x ".join(spread)),
        ("tokens", f"at most {trainer.max_tokens_per_gpu} of a micro-batch on each rank{per_row}"),
        (
            "memory",
            f"about {binary(cost.peak)} a rank in {cost.dtype} at the peak of a step: {parts} + activations "
            f"{binary(cost.activations)} (recompute: {cut.recompute}) + head and workspace {binary(cost.workspace)}",
        ),
        ("", "with recompute " + ", ".join(f"{name} about {binary(size)}" for name, size in others.items())),
    ]


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return rows of a name and a text as aligned lines."""
    width = max(len(name) for name, _ in rows)
    return [f"{name.ljust(width)}  {text}" for name, text in rows]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def quantity(number: float, giga: str = "G") -> str:
    """Return a number with three digits and a decimal prefix: 1.5e9 is `1.5G`, or `1.5B` as parameters are counted."""
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), (giga, 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{prefix}"
    return f"{number:.3g}"


def binary(size: float) -> str:
    """Return a number of bytes with a binary prefix."""
    for prefix in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.3g} {prefix}"
        size /= 1024
    return f"{size:.3g} TiB"
