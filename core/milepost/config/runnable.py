"""Whether what was planned can be started here: packages that are installed, a conversion that was made."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from milepost.config.converted import conversion_problem
from milepost.config.plan import Plan
from milepost.errors import ConfigError, Problem

_EXTRAS: tuple[tuple[str, Callable[[Plan], bool], tuple[str, ...], str], ...] = (
    ("model", lambda plan: True, ("torch", "transformers", "safetensors"), "pip install 'milepost[torch]'"),
    ("cluster.launcher", lambda plan: plan.config.cluster.launcher == "ray", ("ray",), "pip install 'milepost[ray]'"),
    (
        "engine.backend",
        lambda plan: plan.config.engine.backend == "sglang",
        ("sglang", "aiohttp"),
        "pip install 'milepost[sglang]' beside a GPU, scripts/install_sglang_cpu.sh for a CPU",
    ),
    (
        "trainer.backend",
        lambda plan: plan.config.trainer.backend == "megatron",
        ("megatron.core", "psutil"),
        "pip install 'milepost[megatron]'",
    ),
    ("track.wandb", lambda plan: plan.config.track.wandb is not None, ("wandb",), "pip install 'milepost[wandb]'"),
    ("track.tensorboard", lambda plan: plan.config.track.tensorboard, ("tensorboard",), "pip install tensorboard"),
)
"""(path, whether the plan asks for it, packages, remedy)."""


def _is_installed(package: str) -> bool:
    """Whether a package, or a submodule of it, is there; the parent of a submodule is imported, so keep that light."""
    parent, _, _ = package.partition(".")
    return find_spec(parent) is not None and find_spec(package) is not None


def check_installed(plan: Plan) -> None:
    """Raise ConfigError if packages that the plan asks for are not installed. Imports nothing."""
    if problems := _absent_packages(plan):
        raise ConfigError(problems)


def check_runnable(plan: Plan) -> None:
    """Raise ConfigError if the plan cannot be started here. Imports no torch."""
    problems = _absent_packages(plan)
    if plan.converted is not None and (message := conversion_problem(plan.model_path, plan.converted)) is not None:
        path = "model.converted"
        problems.append(Problem(path, f"{message}; milepost prepare makes it", plan.origins.get(path, "")))
    if problems:
        raise ConfigError(problems)


def _absent_packages(plan: Plan) -> list[Problem]:
    problems = []
    for path, asked, packages, remedy in _EXTRAS:
        absent = [package for package in packages if not _is_installed(package)]
        if asked(plan) and absent:
            message = f"needs {' and '.join(absent)}, not installed here; {remedy}"
            problems.append(Problem(path, message, plan.origins.get(path, "")))
    return problems
