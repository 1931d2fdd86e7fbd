"""What a process of a run builds from the plan, wherever it stands: a rank's trainer, an engine."""

from __future__ import annotations

import json
import os

import torch

from milepost.config.plan import Plan
from milepost.errors import ConfigError, Problem
from milepost.recipe import Recipe
from milepost.rollout.local.engine import LocalEngine
from milepost.tokenizer import Tokenizer
from milepost.training.ranks import Ranks
from milepost.training.torch_trainer import TorchTrainer
from milepost.training.trainer import Trainer


def choose_device(name: str) -> torch.device:
    """Return the device to compute on. Raises ConfigError if a GPU is asked for and there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        message = "cuda was given, but torch finds no GPU; use auto or cpu, or install a torch that was built for CUDA"
        raise ConfigError([Problem("run.device", message)])
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype to compute in: `auto` is bfloat16 on a GPU and float32 on a CPU."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def prepare_process(plan: Plan, threads: int | None) -> tuple[torch.device, torch.dtype]:
    """Seed torch, limit its threads (None leaves its default), and return the device and dtype of the plan."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(plan.config.run.seed)
    device = choose_device(plan.config.run.device)
    return device, choose_dtype(plan.config.model.dtype, device)


def threads_per_process(plan: Plan) -> int:
    """CPU threads of each rank: what `run.threads` says, or an equal share of what torch would take alone."""
    ranks_here = -(-plan.world_size // plan.config.cluster.nodes)
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return plan.config.run.threads or max(1, min(torch.get_num_threads(), available) // ranks_here)


def build_trainer(plan: Plan, device: torch.device, dtype: torch.dtype, ranks: Ranks | None = None) -> Trainer:
    """Make the trainer of one rank. Megatron knows its ranks by the process group, torch by `ranks`."""
    recipe: Recipe = plan.model.build()
    if plan.config.trainer.backend == "megatron":
        # Megatron-core is an extra, and slow to import.
        from milepost.training.megatron.trainer import MegatronTrainer

        return MegatronTrainer(plan, recipe=recipe, algorithm=plan.algorithm.build(), device=device, dtype=dtype)
    return TorchTrainer(plan, recipe=recipe, algorithm=plan.algorithm.build(), device=device, dtype=dtype, ranks=ranks)


def build_engine(
    plan: Plan, tokenizer: Tokenizer, device: torch.device, dtype: torch.dtype, *, name: str = "0"
) -> LocalEngine:
    """Make a local engine. Raises ConfigError for a checkpoint that the recipe cannot decode."""
    recipe: Recipe = plan.model.build()
    text = (plan.model_path / "config.json").read_text(encoding="utf-8")
    try:
        decoder = recipe.hf.decoder(json.loads(text), dtype, device)
    except ValueError as error:
        raise ConfigError([Problem("model.path", str(error))]) from error
    return LocalEngine(
        decoder=decoder,
        decode=tokenizer.decode,
        end_token_ids=tokenizer.end_token_ids,
        max_positions=plan.config.rollout.max_context_len or plan.layout.max_positions,
        max_running_requests=plan.config.engine.max_running_requests,
        name=name,
        **plan.config.engine.options,
    )
