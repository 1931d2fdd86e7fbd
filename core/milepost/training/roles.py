"""The roles a torch trainer holds: models that are trained, with their optimizer, and frozen ones."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from milepost.errors import PhaseError
from milepost.training.optimizer import Optimizer, OptimizerSettings, RoleOptimizer, relocate
from milepost.training.policy import Policy
from milepost.training.sharding import ShardedOptimizer, shard
from milepost.training.trainer import Part, Role
from milepost.weights.source import GatheredSource, ModuleSource
from milepost.weights.transport import WeightSource

PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")


class TrainedRole:
    """A model and its optimizer, whole or shared out over the ranks of a mesh."""

    def __init__(
        self,
        role: Role,
        policy: Policy,
        settings: OptimizerSettings,
        device: torch.device,
        mesh: DeviceMesh | None = None,
    ) -> None:
        self.role = role
        self.policy = policy
        self._device = device
        self._on_device = set(PARTS)
        self._dtypes: dict[str, torch.dtype] | None = None
        """Of a sharded model's tensors, before its parts became float32."""
        self.optimizer: RoleOptimizer
        if mesh is None:
            self.optimizer = Optimizer(self._trainable(), settings)
        else:
            self._trainable()  # freezes what a critic does not train
            self._dtypes = shard(policy, mesh, trained=True)
            self.optimizer = ShardedOptimizer(self._trainable(), self._dtypes, settings, policy)

    def _trainable(self) -> dict[str, nn.Parameter]:
        """Parameters by checkpoint name: the whole model of a policy, body and value head of a critic."""
        hf, head = self.policy.hf, self.policy.value_parameters()
        parameters = {name: p for name, p in hf.model.named_parameters() if p.requires_grad}
        if not head:
            return parameters
        in_body = {id(p) for p in hf.body.parameters()}
        for name in [name for name, p in parameters.items() if id(p) not in in_body]:
            parameters.pop(name).requires_grad_(False)
        return parameters | head

    def source(self) -> WeightSource:
        """The weights under Hugging Face names; a critic's have its value head behind them."""
        model, extra = self.policy.hf.model, self.policy.value_parameters()
        return ModuleSource(model, extra) if self._dtypes is None else GatheredSource(model, self._dtypes, extra)

    def require(self, *parts: Part) -> None:
        """Raise PhaseError if one of these parts is not on the device."""
        missing = [part for part in parts if part not in self._on_device]
        if missing:
            raise PhaseError(f"the {self.role}'s {' and '.join(missing)} are offloaded; onload them first")

    def offload(self, parts: Collection[Part]) -> None:
        """Move parts to host memory; on a CPU they stay, but are no more to be used."""
        for part in self._on_device & set(parts):
            self.optimizer.move(part, torch.device("cpu"))
            self._on_device.discard(part)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # what the allocator keeps, nobody else can take

    def onload(self, parts: Collection[Part]) -> None:
        """Bring parts back to the device."""
        for part in set(parts) - self._on_device:
            self.optimizer.move(part, self._device)
            self._on_device.add(part)


class FrozenRole:
    """A model that is only asked; on a GPU its weights lie in host memory and are swapped in while it is."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self.policy = policy
        self._device = device
        self._parameters = list(policy.hf.model.parameters())
        for parameter in self._parameters:
            parameter.requires_grad_(False)
        self._host = [parameter.data for parameter in self._parameters]
        if device.type != "cpu":
            self._host = [weight.pin_memory() for weight in self._host]
            for buffer in policy.hf.model.buffers():
                buffer.data = buffer.data.to(device)

    def __enter__(self) -> Policy:
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = relocate(host, self._device)
        return self.policy

    def __exit__(self, *exception: object) -> None:
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = host


class ShardedFrozenRole:
    """A model that is only asked, shared out over the ranks of a mesh; each rank's part lies in host memory."""

    def __init__(self, policy: Policy, device: torch.device, mesh: DeviceMesh) -> None:
        self.policy = policy
        self._device = device
        policy.requires_grad_(False)
        shard(policy, mesh, trained=False)
        policy.to("cpu")

    def __enter__(self) -> Policy:
        return self.policy.to(self._device)

    def __exit__(self, *exception: object) -> None:
        self.policy.to("cpu")
