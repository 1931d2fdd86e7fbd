"""A run config or plan as text to read and as plain data."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from milepost.config.estimates import estimate
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
    total = (cost.weights + cost.gradients + cost.optimizer) * cost.trained_roles
    trained = f" x {cost.trained_roles} roles" if cost.trained_roles > 1 else ""
    rows += [
        (
            "memory",
            f"about {binary(total)} a rank in {cost.dtype}: weights {binary(cost.weights)} + gradients "
            f"{binary(cost.gradients)} + optimizer {binary(cost.optimizer)}{trained}; activations come on top",
        ),
        ("engine memory", f"about {binary(cost.engine_weights)} of weights a device; its cache comes on top"),
        (
            "arithmetic",
            f"at most {quantity(cost.flops_per_sample)} FLOP to train on a sample, "
            f"{quantity(cost.flops_per_rollout)} FLOP on a rollout, prompts aside",
        ),
    ]
    if plan.config.engine.backend == "sglang":
        rows.append(("a lost engine", refill_text(plan)))
    if cost.frozen_roles:
        rows.append(("host memory", f"about {binary(cost.weights * cost.frozen_roles)} of frozen weights"))
    return table(rows)


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
