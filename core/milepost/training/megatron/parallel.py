"""Megatron's process groups, and where this rank stands in them."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from milepost.config.schema import TrainerSection
from milepost.training.megatron.cpu import install, keep_adam_steps
from milepost.weights.transport import RankInfo, World


@dataclass(frozen=True, slots=True)
class Parallelism:
    """How a model is spread over ranks; what is left of the world is data parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    """Ranks that share the experts of a layer, among all ranks of a pipeline stage; each expert is whole on one."""
    interleave: int = 1
    """Pieces of the model on each pipeline rank (virtual pipeline stages)."""
    sequence: bool = False
    """Split activations between tensor-parallel ranks along the sequence."""

    @classmethod
    def of(cls, section: TrainerSection) -> Parallelism:
        """Take the parallelism of a run config."""
        return cls(
            tensor=section.tensor_parallel,
            pipeline=section.pipeline_parallel,
            context=section.context_parallel,
            expert=section.expert_parallel,
            interleave=section.virtual_pipeline_parallel,
            # Without tensor parallelism there is nothing to split between.
            sequence=section.sequence_parallel and section.tensor_parallel > 1,
        )


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where this rank stands."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    data: int

    def is_first(self) -> bool:
        """Whether the rank is the one of its pipeline stage and data-parallel share that speaks for the others."""
        return self.tensor == 0 and self.context == 0


def ensure_process_group(device: torch.device) -> None:
    """Make a process group of this process alone, where nobody made a larger one."""
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=0, world_size=1)


def initialize(parallelism: Parallelism, seed: int) -> None:
    """Make Megatron's groups over all ranks of the default process group, and seed its random states.

    Raises ValueError if groups of another parallelism are there, or the ranks do not divide the world.
    """
    from megatron.core import parallel_state, tensor_parallel

    install()
    keep_adam_steps()
    wanted = asdict(parallelism)
    if parallel_state.model_parallel_is_initialized():
        present = {
            "tensor": parallel_state.get_tensor_model_parallel_world_size(),
            "pipeline": parallel_state.get_pipeline_model_parallel_world_size(),
            "context": parallel_state.get_context_parallel_world_size(),
            "expert": parallel_state.get_expert_model_parallel_world_size(),
            "interleave": parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        }
        if present != {name: wanted[name] for name in present}:
            raise ValueError(f"this process has groups of {present}, asked for {wanted}; call destroy() first")
        return
    world, size = dist.get_world_size(), parallelism.tensor * parallelism.pipeline * parallelism.context
    if world % size:
        raise ValueError(f"{world} ranks cannot be shared by tensor x pipeline x context parallel = {size}")
    if world // parallelism.pipeline % parallelism.expert:
        raise ValueError(
            f"{world // parallelism.pipeline} ranks of a pipeline stage cannot be shared by {parallelism.expert} "
            "expert-parallel ranks"
        )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallelism.tensor,
        pipeline_model_parallel_size=parallelism.pipeline,
        virtual_pipeline_model_parallel_size=parallelism.interleave if parallelism.interleave > 1 else None,
        context_parallel_size=parallelism.context,
        expert_model_parallel_size=parallelism.expert,
        expert_tensor_parallel_size=1,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def destroy() -> None:
    """Forget Megatron's groups; the default process group stays."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def coordinates() -> Coordinates:
    """Return where this rank stands."""
    from megatron.core import parallel_state as state

    return Coordinates(
        tensor=state.get_tensor_model_parallel_rank(),
        pipeline=state.get_pipeline_model_parallel_rank(),
        context=state.get_context_parallel_rank(),
        expert=state.get_expert_model_parallel_rank(),
        data=state.get_data_parallel_rank(),
    )


def describe_world(device: torch.device) -> World:
    """Gather every rank's place and coordinates; called on all ranks."""
    name = f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "cpu"
    mine = RankInfo(dist.get_rank(), node=platform.node(), device=name, **asdict(coordinates()))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return World(tuple(ranks))


class _AllReduceSum(torch.autograd.Function):
    """Sum over a group, whose gradient is the sum of the group's gradients.

    That is the gradient of the sum of all ranks' losses, which is what the ranks' backward passes compute together.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def all_reduce_sum(x: Tensor, group: Any) -> Tensor:
    """Sum x over the ranks of a group; differentiable."""
    total: Tensor = _AllReduceSum.apply(x, group)  # type: ignore[no-untyped-call]
    return total


class _GatherRows(torch.autograd.Function):
    """Rows of all ranks of a group, one rank after the other; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        gathered = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        size = dist.get_world_size(ctx.group)
        share = grad.new_empty(grad.shape[0] // size, *grad.shape[1:])
        dist.reduce_scatter_tensor(share, grad.contiguous(), group=ctx.group)
        return share, None


def gather_rows(x: Tensor, group: Any) -> Tensor:
    """Gather x [n, ...] of every rank of a group into [ranks x n, ...]; differentiable."""
    gathered: Tensor = _GatherRows.apply(x, group)  # type: ignore[no-untyped-call]
    return gathered
