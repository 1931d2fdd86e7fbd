"""A role shared out over the data-parallel ranks: each holds its part of every parameter, gradient and optimizer state.

FSDP2 (`torch.distributed.fsdp.fully_shard`) gathers a layer when it runs, forward and backward, and reduces its
gradient to the parts at once; embedding, head and what else is no layer make up a last group. The parts are float32 at
least (the master weights), are gathered in the dtype that the model computes in, and gradients are summed in float32.
What leaves a rank, weights to an engine and checkpoints, is whole tensors in the model's own dtype, gathered one after
the other, so that a checkpoint does not tell how many ranks wrote it.

FSDP2 works on modules that run one by one, so the body runs as transformers has it: the dense body of a CPU
(`milepost.training.dense`) is one node over all parameters, for which the whole model would have to be gathered.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from milepost.training.optimizer import (
    OptimizerSettings,
    check_state,
    check_tensor,
    decay_of,
    make_optimizer,
    saved_slots,
)
from milepost.training.policy import Policy

LOW_PRECISION = (torch.bfloat16, torch.float16)


def shard(policy: Policy, mesh: DeviceMesh, *, trained: bool) -> dict[str, torch.dtype]:
    """Cut a policy's parameters over the ranks of a one-dimensional mesh, and move them to its devices.

    Every rank gives the same whole policy, best on the CPU: a layer is moved as a whole and then cut. A model without
    layers that transformers marks as such is gathered all at once when it runs.

    Args:
        policy: from then on to be run on all ranks together, equally often.
        mesh: the ranks.
        trained: whether parameters become float32 at least, to be updated; a frozen policy's stay as they are.

    Returns:
        The dtype that each tensor of the model and its value head had before, by checkpoint name.
    """
    policy.hf = replace(policy.hf, batch_body=None)
    dtypes = {name: tensor.dtype for name, tensor in policy.named_tensors().items()}
    layers = [module for module in policy.hf.body.modules() if isinstance(module, GradientCheckpointingLayer)]
    groups: list[nn.Module] = [*layers, policy]
    if policy.value_head is not None:
        groups.insert(0, policy.value_head)  # its precision is its own
    for group in groups:
        parameters = [parameter for parameter in group.parameters() if not isinstance(parameter, DTensor)]
        dtype = parameters[0].dtype if parameters else torch.float32
        if trained:
            for parameter in parameters:
                parameter.data = parameter.data.to(torch.promote_types(torch.float32, parameter.dtype))
        precision = MixedPrecisionPolicy(
            param_dtype=dtype if trained and dtype in LOW_PRECISION else None,
            reduce_dtype=torch.promote_types(torch.float32, dtype),
        )
        cut = fully_shard(group, mesh=mesh, reshard_after_forward=True, mp_policy=precision)
        # Token weights carry the normalisation already: gradients are summed, never averaged.
        cut.set_gradient_divide_factor(1.0)
        cut.set_force_sum_reduction_for_comms(True)
    return dtypes


def local_part(whole: Tensor, parameter: DTensor) -> Tensor:
    """Return this rank's part of a whole tensor, as a view: FSDP2 cuts the first dimension like `torch.chunk`."""
    rank = parameter.device_mesh.get_local_rank()
    parts = torch.chunk(whole, parameter.device_mesh.size(), dim=0)
    return parts[rank] if rank < len(parts) else whole[:0]


def gather(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor whole on every rank, in another dtype if one is given; called on all ranks."""
    tensor = tensor.detach()
    tensor = tensor if dtype is None else tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class ShardedOptimizer:
    """Implements `milepost.training.optimizer.RoleOptimizer` over the parts of a policy that `shard` has cut.

    Args:
        parameters: the trained ones by name.
        dtypes: what `shard` returned.
        settings: rates, decay, clipping.
        policy: all of it moves when the weights do.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        dtypes: Mapping[str, torch.dtype],
        settings: OptimizerSettings,
        policy: Policy,
    ) -> None:
        self.settings = settings
        self.num_steps = 0
        self._parameters = {name: cast("DTensor", parameter) for name, parameter in parameters.items()}
        self._dtypes = {name: dtypes[name] for name in parameters}
        self._policy = policy
        self._home = next(iter(parameters.values())).device
        self._torch = make_optimizer(
            [{"params": [p], "weight_decay": decay_of(p, settings)} for p in parameters.values()], settings
        )

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.settings.lr_at(self.num_steps)

    def zero_gradients(self) -> None:
        """Begin a new sum of gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def gradients(self) -> list[Tensor]:
        """Nothing: FSDP2 has summed gradients over ranks already."""
        return []

    def _parts(self) -> list[Tensor]:
        """This rank's parts of the gradients; what no sample reached has a gradient of zero."""
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return [cast("DTensor", parameter.grad).to_local() for parameter in self._parameters.values()]

    def gradient_norm(self) -> float:
        """Norm of all gradients of all ranks together; not finite if any of them is not."""
        norms = torch.stack([torch.linalg.vector_norm(part) for part in self._parts()])
        square = torch.linalg.vector_norm(norms).square()
        dist.all_reduce(square)
        return float(square.sqrt())

    def step(self, norm: float) -> None:
        """Clip gradients, whose norm is given, and apply them."""
        limit = self.settings.clip_grad
        parts = self._parts()
        if limit and norm > limit:
            torch._foreach_mul_(parts, limit / (norm + 1e-6))
        for group in self._torch.param_groups:
            group["lr"] = self.lr
        self._torch.step()
        self.num_steps += 1

    def move(self, part: Literal["weights", "gradients", "optimizer"], device: torch.device) -> None:
        """Move this rank's share of a part to a device; gradients are dropped and made anew."""
        if self._home.type == "cpu":
            return  # nothing ever leaves
        if part == "gradients":
            if device != self._home:
                self.zero_gradients()
        elif part == "weights":
            self._policy.to(device)
        else:
            for state in self._torch.state.values():
                for name, value in state.items():
                    if isinstance(value, DTensor):
                        state[name] = value.to(device)

    # Checkpoints

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters in the model's dtype, whole, in host memory of the first rank; empty on the others."""
        return self._gathered((name, p, self._dtypes[name]) for name, p in self._parameters.items())

    @torch.no_grad()
    def load_weights(self, saved: Mapping[str, Tensor]) -> None:
        """Take this rank's parts of what `weights` gave. Raises CheckpointError for another shape or dtype."""
        for name, parameter in self._parameters.items():
            check_tensor(saved[name], parameter.shape, self._dtypes[name], name)
            parameter.to_local().copy_(local_part(saved[name], parameter))

    def names(self) -> set[str]:
        """Names of the trained parameters."""
        return set(self._parameters)

    def state(self) -> dict[str, Tensor]:
        """What `Optimizer.state` gives, whole, in host memory of the first rank; empty on the others."""
        masters = [(f"master.{name}", self._parameters[name], None) for name in self._with_master()]
        slots = [
            (f"{key}.{name}", value, None)
            for name, parameter in self._parameters.items()
            for key, value in self._torch.state[parameter].items()
            if isinstance(value, DTensor)
        ]
        return self._gathered([*masters, *slots])

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Take this rank's parts of what `state` gave after `num_steps` steps, whoever gave it.

        Raises CheckpointError if it is of other parameters.
        """
        keys = saved_slots(self.settings, num_steps)
        masters = self._with_master()
        slotted = [f"{key}.{name}" for name in self._parameters for key in keys]
        check_state(state, [*slotted, *(f"master.{name}" for name in masters)])
        self.num_steps = num_steps
        for name, parameter in self._parameters.items():
            slots = {key: torch.zeros_like(parameter.detach()) for key in keys}
            if keys:
                step = torch.tensor(float(num_steps), dtype=torch.float32, device=parameter.device)
                self._torch.state[cast("nn.Parameter", parameter)] = {"step": step, **slots}
            for key, value in (slots | ({"master": parameter} if name in masters else {})).items():
                whole = state[f"{key}.{name}"]
                check_tensor(whole, parameter.shape, parameter.dtype, f"{key}.{name}")
                cast("DTensor", value).to_local().copy_(local_part(whole, parameter))

    def _with_master(self) -> list[str]:
        return [name for name, dtype in self._dtypes.items() if dtype in LOW_PRECISION]

    def _gathered(self, tensors: Iterable[tuple[str, Tensor, torch.dtype | None]]) -> dict[str, Tensor]:
        """Gather one after the other; the first rank keeps them in host memory."""
        found: dict[str, Tensor] = {}
        for name, tensor, dtype in tensors:
            whole = gather(tensor, dtype)
            if dist.get_rank() == 0:
                found[name] = whole.cpu()
        return found
