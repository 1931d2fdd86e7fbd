"""What a plan costs, roughly, from the numbers in the model's `config.json`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from milepost.components import ModelTraits
from milepost.config.plan import Plan


@dataclass(frozen=True, slots=True)
class Estimates:
    """Rough figures; activations, caches and what an allocator wastes come on top."""

    dtype: str
    """Compute dtype they are for."""
    weights: int
    """Bytes on one rank, actor alone; so are gradients and optimizer."""
    gradients: int
    optimizer: int
    """Adam's two moments, and the float32 master weights where the compute dtype is bfloat16."""
    trained_roles: int
    """Roles with gradients and an optimizer: the actor, and the critic if there is one."""
    frozen_roles: int
    """Roles with weights alone, kept in host memory: reference and teacher."""
    engine_weights: int
    """Bytes of the engine's copy on each of its devices."""
    flops_per_sample: float
    """Floating-point operations of forward and backward over one sample of max_response_len tokens."""
    flops_per_rollout: float
    """The same for all samples of a rollout: an upper bound on training."""


def estimate(plan: Plan) -> Estimates:
    """Estimate memory and arithmetic of a plan.

    `dtype: auto` counts as bfloat16 where the plan has GPUs and as float32 elsewhere. Weights are divided by tensor
    and pipeline parallelism; sharding the optimizer over data-parallel ranks is not counted.
    """
    config = plan.config
    dtype = config.model.dtype
    if dtype == "auto":
        on_gpu = config.run.device == "cuda" or config.cluster.gpus_per_node > 0
        dtype = "bfloat16" if on_gpu else "float32"
    width = 2 if dtype == "bfloat16" else 4
    parameters = plan.layout.num_parameters
    share = -(-parameters // (config.trainer.tensor_parallel * config.trainer.pipeline_parallel))
    moments = 8 if config.optimizer.name == "adam" else 0
    master = 4 if dtype == "bfloat16" else 0
    traits = cast("ModelTraits", plan.model.component.traits)
    flops = traits.train_flops(plan.layout, config.rollout.max_response_len)
    return Estimates(
        dtype=dtype,
        weights=share * width,
        gradients=share * width,
        optimizer=share * (moments + master),
        trained_roles=1 + plan.needs_critic,
        frozen_roles=plan.needs_reference + plan.needs_teacher,
        engine_weights=-(-parameters * width // config.engine.gpus_per_engine),
        flops_per_sample=flops,
        flops_per_rollout=flops * plan.batch_size * plan.samples_per_prompt,
    )
