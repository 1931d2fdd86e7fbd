"""Optimizer of one role: parameters in flat buffers, float32 state, clipping, and the learning-rate schedule.

Parameters of one dtype and weight decay share one flat buffer, of which each is a view, and so do their gradients: an
optimizer step, a gradient norm or a reduction over ranks is then one operation on a large tensor, which is what keeps
the cost of small models down and memory easy to move.

Parameters in 16-bit precision have a float32 master copy, and their gradients are summed over micro-batches in float32.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from milepost.config.schema import CriticSection, OptimizerSection
from milepost.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class OptimizerSettings:
    """How one role is updated; see `milepost.config.schema.OptimizerSection` for the fields."""

    name: Literal["adam", "sgd"] = "adam"
    lr: float = 1e-6
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    eps: float = 1e-8
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    decay_steps: int = 1
    min_lr: float = 0.0
    clip_grad: float = 1.0

    @classmethod
    def of(cls, section: OptimizerSection, num_steps: int, critic: CriticSection | None = None) -> OptimizerSettings:
        """Take the settings of a run config, the critic's falling back to the actor's.

        `num_steps` is the number of optimizer steps in the run, over which the rate decays by default.
        """
        values = section.model_dump()
        if critic is not None:
            for name in ("lr", "weight_decay", "schedule", "warmup_steps", "decay_steps", "min_lr", "clip_grad"):
                if (own := getattr(critic, name)) is not None:
                    values[name] = own
        if values["decay_steps"] is None:
            values["decay_steps"] = num_steps
        return cls(**values)

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step `step`, counted from 0."""
        return lr_at(
            step,
            lr=self.lr,
            schedule=self.schedule,
            warmup_steps=self.warmup_steps,
            decay_steps=self.decay_steps,
            min_lr=self.min_lr,
        )


def lr_at(
    step: int,
    *,
    lr: float,
    schedule: Literal["constant", "linear", "cosine"],
    warmup_steps: int,
    decay_steps: int,
    min_lr: float,
) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Warm-up step s has lr x (s + 1) / warmup_steps, so that the last one has the full rate and the first is not wasted.
    Then `constant` stays; `linear` and `cosine` fall from lr to min_lr while s goes from warmup_steps to decay_steps,
    and stay there.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    span = decay_steps - warmup_steps
    progress = min((step - warmup_steps) / span, 1.0) if span > 0 else 1.0
    remaining = 1.0 - progress if schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return min_lr + (lr - min_lr) * remaining


class RoleOptimizer(Protocol):
    """What updates the parameters of one role, on one rank of those that share the update."""

    settings: OptimizerSettings
    num_steps: int
    """Optimizer steps applied; skipped ones do not count."""

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        ...

    def zero_gradients(self) -> None:
        """Begin a new sum of gradients."""
        ...

    def gradients(self) -> list[Tensor]:
        """The gradients that have yet to be summed over ranks, in place."""
        ...

    def gradient_norm(self) -> float:
        """Norm of all gradients together; not finite if any of them is not."""
        ...

    def step(self, norm: float) -> None:
        """Clip gradients, whose norm is given, and apply them."""
        ...

    def move(self, part: Literal["weights", "gradients", "optimizer"], device: torch.device) -> None:
        """Move a part to a device; gradients are zero between steps, so they are dropped and made anew."""
        ...

    def names(self) -> set[str]:
        """Names of the trained parameters."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters by name, whole, for whichever rank writes checkpoints."""
        ...

    def load_weights(self, saved: Mapping[str, Tensor]) -> None:
        """Take over what `weights` gave. Raises CheckpointError for another shape or dtype."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs beside the weights, by parameter: `exp_avg.NAME` and so on, `master.NAME`."""
        ...

    def load_state(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Take over what `state` gave after `num_steps` steps. Raises CheckpointError if it is of other parameters."""
        ...


class FlatGroup:
    """Parameters of one dtype and one weight decay in one buffer of P elements."""

    def __init__(self, parameters: Sequence[tuple[str, nn.Parameter]], weight_decay: float) -> None:
        self.names = [name for name, _ in parameters]
        self.parameters = [parameter for _, parameter in parameters]
        self.weight_decay = weight_decay
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.device = self.parameters[0].device
        self.dtype = self.parameters[0].dtype
        self.low_precision = self.dtype in (torch.bfloat16, torch.float16)
        self.weights = torch.cat([parameter.detach().flatten() for parameter in self.parameters])
        """[P] in the parameters' dtype."""
        self.master = nn.Parameter(self.weights.float() if self.low_precision else self.weights)
        """[P] what the optimizer updates: the weights themselves, or their float32 copy."""
        self.gradient: Tensor | None = None
        """[P] in the master's dtype; None while it is not on the device."""
        self._gradient_views: list[Tensor] = []
        if self.low_precision:
            for position, parameter in enumerate(self.parameters):
                hook = self._make_hook(position)
                parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        self.attach()

    def views(self, flat: Tensor) -> list[Tensor]:
        """Cut a flat tensor [P] into the parameters' shapes."""
        parts = torch.split(flat, self.sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def attach(self) -> None:
        """Make the parameters views of the weights, and their gradients of the gradient."""
        for parameter, view in zip(self.parameters, self.views(self.weights), strict=True):
            parameter.grad = None
            parameter.data = view
        if self.gradient is not None and self.gradient.device == self.weights.device and not self.low_precision:
            for parameter, view in zip(self.parameters, self.views(self.gradient), strict=True):
                parameter.grad = view

    def zero_gradient(self) -> None:
        """Begin a new sum of gradients."""
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.master)
            self._gradient_views = self.views(self.gradient)
            self.attach()
        else:
            self.gradient.zero_()
        self.master.grad = self.gradient

    def drop_gradient(self) -> None:
        """Free the gradient's memory."""
        self.gradient = self.master.grad = None
        self._gradient_views = []
        for parameter in self.parameters:
            parameter.grad = None

    def publish(self) -> None:
        """Bring what the optimizer did to the master into 16-bit weights."""
        if self.low_precision:
            self.weights.copy_(self.master.detach())

    def _make_hook(self, position: int) -> Any:
        def add(parameter: nn.Parameter) -> None:
            gradient = parameter.grad
            assert gradient is not None, "called after a gradient was accumulated"
            self._gradient_views[position].add_(gradient)
            parameter.grad = None

        return add


class Optimizer:
    """AdamW or plain SGD over the trainable parameters of one role; implements `RoleOptimizer`.

    Args:
        parameters: trainable parameters by name; they become views of flat buffers.
        settings: rates, decay, clipping. Matrices decay, vectors (norms, biases) do not.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], settings: OptimizerSettings) -> None:
        if not parameters:
            raise ValueError("no parameters were given, expected the trainable ones of a model")
        self.settings = settings
        self.num_steps = 0
        """Optimizer steps applied; skipped ones do not count."""
        grouped: dict[tuple[torch.dtype, float], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in parameters.items():
            decay = decay_of(parameter, settings)
            grouped.setdefault((parameter.dtype, decay), []).append((name, parameter))
        self.groups = [FlatGroup(members, decay) for (_, decay), members in grouped.items()]
        masters = [{"params": [group.master], "weight_decay": group.weight_decay} for group in self.groups]
        self._torch = make_optimizer(masters, settings)

    def zero_gradients(self) -> None:
        """Begin a new sum of gradients."""
        for group in self.groups:
            group.zero_gradient()

    def gradients(self) -> list[Tensor]:
        """The flat gradients, to be summed over ranks in place."""
        return [group.gradient for group in self.groups if group.gradient is not None]

    def gradient_norm(self) -> float:
        """Norm of all gradients together; not finite if any of them is not."""
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in self.gradients()])
        return float(torch.linalg.vector_norm(norms))

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.settings.lr_at(self.num_steps)

    def step(self, norm: float) -> None:
        """Clip gradients, whose norm is given, and apply them."""
        limit = self.settings.clip_grad
        if limit and norm > limit:
            for gradient in self.gradients():
                gradient.mul_(limit / (norm + 1e-6))
        lr = self.lr
        for group in self._torch.param_groups:
            group["lr"] = lr
        self._torch.step()
        for flat in self.groups:
            flat.publish()
        self.num_steps += 1

    def names(self) -> set[str]:
        """Names of the trained parameters."""
        return {name for group in self.groups for name in group.names}

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters by name."""
        return {
            name: parameter.detach()
            for group in self.groups
            for name, parameter in zip(group.names, group.parameters, strict=True)
        }

    @torch.no_grad()
    def load_weights(self, saved: Mapping[str, Tensor]) -> None:
        """Take over what `weights` gave, and make float32 copies anew."""
        for name, tensor in self.weights().items():
            copy_checked(tensor, saved[name], name)
        for group in self.groups:
            if group.low_precision:
                group.master.copy_(group.weights)

    def move(self, part: Literal["weights", "gradients", "optimizer"], device: torch.device) -> None:
        """Move a part to a device; gradients are zero between steps, so they are dropped and made anew.

        The host's copy is pinned where there is a GPU, so that moving is fast.
        """
        for group in self.groups:
            if group.device.type == "cpu":
                continue  # nothing ever leaves
            if part == "gradients":
                if device != group.device:
                    group.drop_gradient()
                continue
            if part == "weights":
                group.weights = relocate(group.weights, device)
                if not group.low_precision:
                    group.master.grad = None
                    group.master.data = group.weights
                group.attach()
                continue
            if group.low_precision:
                group.master.grad = None
                group.master.data = relocate(group.master.data, device)
            for name, value in self._torch.state[group.master].items():
                if isinstance(value, Tensor) and value.dim():
                    self._torch.state[group.master][name] = relocate(value, device)

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs beside the weights, by parameter: `exp_avg.NAME` and so on, `master.NAME`."""
        state: dict[str, Tensor] = {}
        for group in self.groups:
            flats = {"master": group.master.detach()} if group.low_precision else {}
            flats |= {key: value for key, value in self._torch.state[group.master].items() if value.dim()}
            for key, flat in flats.items():
                state |= {f"{key}.{name}": view for name, view in zip(group.names, group.views(flat), strict=True)}
        return state

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor], num_steps: int) -> None:
        """Take over what `state` gave after `num_steps` steps. Raises CheckpointError if it is of other parameters."""
        keys = saved_slots(self.settings, num_steps)
        check_state(
            state,
            (
                f"{key}.{name}"
                for group in self.groups
                for name in group.names
                for key in (*keys, *(("master",) if group.low_precision else ()))
            ),
        )
        self.num_steps = num_steps
        for group in self.groups:
            slots = {"master": group.master.detach()} if group.low_precision else {}
            if keys:
                device = group.master.device
                slots |= {key: torch.zeros_like(group.master) for key in keys}
                adam = {key: slots[key] for key in keys}
                step = torch.tensor(float(num_steps), dtype=torch.float32, device=device)
                self._torch.state[group.master] = {"step": step, **adam}
            for key, flat in slots.items():
                for name, view in zip(group.names, group.views(flat), strict=True):
                    copy_checked(view, state[f"{key}.{name}"], f"{key}.{name}")


def make_optimizer(groups: list[dict[str, Any]], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Make torch's optimizer; groups have `params` and `weight_decay`, the rate is set before every step."""
    if settings.name == "adam":
        return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True)
    # Without momentum, decay in the gradient and decoupled decay are the same: p - lr (g + decay p).
    return torch.optim.SGD(groups, foreach=True)


def decay_of(parameter: Tensor, settings: OptimizerSettings) -> float:
    """Weight decay of a parameter: vectors (norms, biases) have none."""
    return settings.weight_decay if parameter.dim() >= 2 else 0.0


def saved_slots(settings: OptimizerSettings, num_steps: int) -> tuple[str, ...]:
    """What the optimizer keeps for each parameter after so many steps."""
    return ("exp_avg", "exp_avg_sq") if settings.name == "adam" and num_steps else ()


def check_state(state: Mapping[str, Tensor], expected: Iterable[str]) -> None:
    """Raise CheckpointError unless a checkpoint's optimizer state has exactly these tensors."""
    differing = sorted(state.keys() ^ set(expected))
    if differing:
        raise CheckpointError(
            f"the checkpoint's optimizer state does not fit this run (differing: {', '.join(differing[:3])}); "
            "resume with the model, dtype and optimizer it was saved with"
        )


def check_tensor(value: Tensor, shape: torch.Size, dtype: torch.dtype, name: str) -> None:
    """Raise CheckpointError if a checkpoint's tensor has another shape or dtype than this run's."""
    if value.shape != shape or value.dtype != dtype:
        raise CheckpointError(
            f"the checkpoint's {name} is {tuple(value.shape)} {value.dtype}, this run's {tuple(shape)} {dtype}; "
            "resume with the model and dtype it was saved with"
        )


def copy_checked(target: Tensor, value: Tensor, name: str) -> None:
    """Copy a checkpoint's tensor in. Raises CheckpointError if shape or dtype differ."""
    check_tensor(value, target.shape, target.dtype, name)
    target.copy_(value)


def relocate(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the tensor on a device, in pinned memory where it comes from a GPU to the host."""
    if tensor.device == device:
        return tensor
    if device.type == "cpu":
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to(device, non_blocking=True)
