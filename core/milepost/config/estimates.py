"""What a plan costs, roughly, from the numbers in the model's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from milepost.components import ModelTraits
from milepost.config.memory import Cut, Load, rank_memory, suggest
from milepost.errors import Problem

if TYPE_CHECKING:
    from milepost.config.plan import Plan


@dataclass(frozen=True, slots=True)
class Estimates:
    """Rough figures; caches and what an allocator wastes come on top."""

    dtype: str
    """Compute dtype they are for."""
    weights: int
    """Bytes on one rank, actor alone; so are gradients and optimizer. Megatron's are those of the rank with most."""
    gradients: int
    optimizer: int
    """Adam's two moments, and the float32 master weights where the compute dtype is bfloat16."""
    activations: int | None
    """Bytes that all micro-batches in flight keep for their backward passes; None for the torch trainer."""
    workspace: int | None
    """Bytes of the output head's logits and gradient, or of one layer's backward pass; None for the torch trainer."""
    peak: int | None
    """Bytes on one rank at the worst moment of a step; None for the torch trainer."""
    trained_roles: int
    """Roles with gradients and an optimizer: the actor, and the critic if there is one."""
    frozen_roles: int
    """Roles with weights alone, kept in host memory: reference and teacher."""
    engine_weights: int
    """Bytes of the engine's copy on each of its devices."""
    host_per_rank: int
    """Bytes of host memory that a rank's roles have while they are not on its GPU: one copy of each."""
    flops_per_sample: float
    """Floating-point operations of forward and backward over one sample of max_response_len tokens."""
    flops_per_rollout: float
    """The same for all samples of a rollout: an upper bound on training."""


def estimate(plan: Plan) -> Estimates:
    """Estimate memory and arithmetic of a plan.

    `dtype: auto` counts as bfloat16 where the plan has GPUs and as float32 elsewhere. Megatron's figures are those of
    `milepost.config.memory`; for the torch trainer weights, gradients and optimizer count as held by every rank.
    """
    config = plan.config
    dtype = compute_dtype(plan)
    width = 2 if dtype == "bfloat16" else 4
    parameters = plan.layout.num_parameters
    traits = cast("ModelTraits", plan.model.component.traits)
    flops = traits.train_flops(plan.layout, config.rollout.max_response_len)
    trained, frozen = 1 + plan.needs_critic, plan.needs_reference + plan.needs_teacher
    activations = workspace = peak = None
    if config.trainer.backend == "megatron":
        load = training_load(plan)
        memory = rank_memory(plan.layout, Cut.of(config.trainer, plan.data_parallel), load)
        # Of one role; roles share the GPU only where nothing is offloaded.
        weights, gradients, optimizer = (
            size // load.trained_roles for size in (memory.weights, memory.gradients, memory.optimizer)
        )
        activations, workspace, peak = memory.activations, memory.workspace, memory.total
    else:
        moments = 8 if config.optimizer.name == "adam" else 0
        master = 4 if dtype == "bfloat16" else 0
        weights = gradients = parameters * width
        optimizer = parameters * (moments + master)
    offloaded = trained * (weights + optimizer) if config.trainer.offload else 0
    return Estimates(
        dtype=dtype,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        activations=activations,
        workspace=workspace,
        peak=peak,
        trained_roles=trained,
        frozen_roles=frozen,
        engine_weights=-(-parameters * width // config.engine.gpus_per_engine),
        host_per_rank=frozen * weights + (offloaded if config.cluster.gpus_per_node else 0),
        flops_per_sample=flops,
        flops_per_rollout=flops * plan.batch_size * plan.samples_per_prompt,
    )


def compute_dtype(plan: Plan) -> str:
    """Return the dtype that a plan computes in."""
    config = plan.config
    if config.model.dtype != "auto":
        return config.model.dtype
    on_gpu = config.run.device == "cuda" or config.cluster.gpus_per_node > 0
    return "bfloat16" if on_gpu else "float32"


def training_load(plan: Plan) -> Load:
    """Return what each rank of a plan's trainer is to hold at once."""
    config = plan.config
    return Load(
        tokens=config.trainer.max_tokens_per_gpu,
        width=2 if compute_dtype(plan) == "bfloat16" else 4,
        adam=config.optimizer.name == "adam",
        trained_roles=1 if config.trainer.offload else 1 + plan.needs_critic,
        frozen_roles=plan.needs_reference + plan.needs_teacher,
    )


def memory_problem(plan: Plan) -> Problem | None:
    """Return what to do where the trainer does not fit into the memory that the plan says its GPUs have."""
    cluster, trainer = plan.config.cluster, plan.config.trainer
    if trainer.backend != "megatron" or cluster.gpu_memory_gib is None:
        return None
    given, load, limit = Cut.of(trainer, plan.data_parallel), training_load(plan), cluster.gpu_memory_gib * 2**30
    needed = rank_memory(plan.layout, given, load).total
    if needed <= limit:
        return None
    message = f"{cluster.gpu_memory_gib:g}, but a training step takes about {needed / 2**30:.0f} GiB on each GPU"
    better = suggest(plan.layout, given, load, gpus_per_node=cluster.gpus_per_node or 1, gpu_memory=limit)
    if better is None:
        remedy = "no layout of these ranks fits; give more GPUs, or a smaller trainer.max_tokens_per_gpu"
    else:
        total = rank_memory(plan.layout, better, load).total / 2**30
        remedy = f"{better.settings(given)} takes about {total:.0f} GiB"
    path = "cluster.gpu_memory_gib"
    return Problem(path, f"{message}; {remedy}", plan.origins.get(path, ""))
