"""The roles of a Megatron trainer: models that are trained, with Megatron's optimizer, and frozen ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from milepost.errors import PhaseError
from milepost.training.logprobs import HeadSettings
from milepost.training.megatron.host import HostCopy
from milepost.training.megatron.model import PolicyModel, run_row, unwrap
from milepost.training.megatron.rows import Row
from milepost.training.optimizer import OptimizerSettings
from milepost.training.trainer import Part, Role, Want

PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")

RowLoss = Callable[[PolicyModel, Tensor, Row], Tensor]
"""From a model's last piece, its hidden states and the row to the loss to call backward on."""


def run_rows(pieces: Sequence[Any], rows: Sequence[Row], loss: RowLoss, *, forward_only: bool) -> None:
    """Put rows through this rank's pieces of a model, by the pipeline schedule that its parallelism asks for.

    The loss is called for every row, on ranks of the last pipeline stage alone; with its result go the row's tokens,
    by whose sum over all rows and ranks the gradients are divided in the end.
    """

    def read(model: Any, row: Row, hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        value = loss(unwrap(model), hidden, row)
        return value, torch.tensor(row.num_tokens, dtype=torch.int, device=value.device), {}

    def step(source: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
        row = next(source)
        return run_row(model, row), partial(read, model, row)

    sources = [iter(rows) for _ in pieces]
    several = len(pieces) > 1
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=sources if several else sources[0],
        model=list(pieces) if several else pieces[0],
        num_microbatches=len(rows),
        # Rows differ in length; pipeline stages tell each other.
        seq_length=rows[0].tokens.shape[1],
        micro_batch_size=1,
        forward_only=forward_only,
    )


class FrozenRole:
    """A model that is only asked; on a GPU its weights lie in host memory and are swapped in while it is."""

    def __init__(self, pieces: Sequence[PolicyModel], settings: HeadSettings) -> None:
        self.pieces = list(pieces)
        self.settings = settings
        for piece in pieces:
            piece.requires_grad_(False)
        self._host = HostCopy([p for piece in pieces for p in piece.parameters()], constant=True)
        self._host.offload()

    def __enter__(self) -> FrozenRole:
        self._host.onload()
        self._host.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        self._host.offload()

    def evaluate(self, rows: Sequence[Row], want: Collection[Want]) -> list[tuple[Row, dict[Want, Tensor]]]:
        """Return what the last pipeline stage says about each row; nothing on other stages."""
        return evaluate(self.pieces, rows, self.settings, want)


def evaluate(
    pieces: Sequence[Any], rows: Sequence[Row], settings: HeadSettings, want: Collection[Want]
) -> list[tuple[Row, dict[Want, Tensor]]]:
    """Return the wanted columns of each row on ranks of the last pipeline stage, without gradients."""
    found: list[tuple[Row, dict[Want, Tensor]]] = []

    def keep(model: PolicyModel, hidden: Tensor, row: Row) -> Tensor:
        found.append((row, model.read(hidden, row, settings, want)))
        return hidden.new_zeros((), dtype=torch.float32)

    with torch.no_grad():
        run_rows(pieces, rows, keep, forward_only=True)
    return found


class TrainedRole:
    """A model, its gradients, and its optimizer.

    Adam is Megatron's distributed optimizer: its state, and the float32 weights of a model in bfloat16, are spread over
    the data- and context-parallel ranks. Gradients are summed and reduced in float32.
    """

    def __init__(
        self, role: Role, pieces: Sequence[PolicyModel], config: Any, settings: OptimizerSettings, head: HeadSettings
    ) -> None:
        self.role = role
        self.settings = settings
        self.head = head
        self.num_steps = 0
        """Optimizer steps applied; skipped ones do not count."""
        self.pieces = list(pieces)
        distributed = settings.name == "adam"
        data = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        self.wrapped = [
            DistributedDataParallel(config, data, piece, disable_bucketing=index > 0)
            for index, piece in enumerate(pieces)
        ]
        self.optimizer = megatron_optimizer.get_megatron_optimizer(
            OptimizerConfig(
                optimizer=settings.name,
                lr=settings.lr,
                weight_decay=settings.weight_decay,
                adam_beta1=settings.betas[0],
                adam_beta2=settings.betas[1],
                adam_eps=settings.eps,
                sgd_momentum=0.0,
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                clip_grad=settings.clip_grad,
                use_distributed_optimizer=distributed,
            ),
            self.wrapped,
        )
        if distributed:
            for optimizer in self.optimizer.chained_optimizers:
                # A third of the time of the default, which goes over memory several times.
                for group in optimizer.optimizer.param_groups:
                    group["fused"] = True
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        self._present = set(PARTS)
        self._weights: HostCopy | None = None
        self._optimizer_state: HostCopy | None = None

    def require(self, *parts: Part) -> None:
        """Raise PhaseError if one of these parts is not on the device."""
        missing = [part for part in parts if part not in self._present]
        if missing:
            raise PhaseError(f"the {self.role}'s {' and '.join(missing)} are offloaded; onload them first")

    def wait_for_optimizer(self) -> None:
        """Wait until the optimizer's state is on the device; it comes while forward and backward passes run."""
        if self._optimizer_state is not None:
            self._optimizer_state.wait()

    def evaluate(self, rows: Sequence[Row], want: Collection[Want]) -> list[tuple[Row, dict[Want, Tensor]]]:
        """Return what the last pipeline stage says about each row; nothing on other stages."""
        return evaluate(self.wrapped, rows, self.head, want)

    def accumulate(self, rows: Sequence[Row], loss: RowLoss) -> None:
        """Sum the gradients of all rows of a step, over all ranks."""
        for wrapped in self.wrapped:
            wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        run_rows(self.wrapped, rows, loss, forward_only=False)

    @torch.no_grad()
    def gradient_norm(self) -> float:
        """Norm of all gradients of all ranks together; not finite if any of them is not."""
        self.wait_for_optimizer()
        self.optimizer.prepare_grads()
        return float(self.optimizer.get_grad_norm())

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self.settings.lr_at(self.num_steps)

    @torch.no_grad()
    def apply(self, norm: float) -> None:
        """Clip gradients, whose norm is given, and apply them."""
        limit = self.settings.clip_grad
        if limit and norm > limit:
            for parameter in self._optimized():
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / (norm + 1e-6))
        lr = self.lr
        for group in self.optimizer.param_groups:
            group["lr"] = lr
            # Norms and biases are in groups of their own, which do not decay.
            group["weight_decay"] = self.settings.weight_decay * group["wd_mult"]
        self.optimizer.step_with_ready_grads()
        self.num_steps += 1

    def _optimized(self) -> list[Tensor]:
        """What the optimizer updates: this rank's share of the weights or of their float32 copies."""
        return [p for optimizer in self.optimizer.chained_optimizers for p in optimizer.get_parameters()]

    def offload(self, parts: Collection[Part]) -> None:
        """Move parts to host memory; on a CPU they stay, but are no more to be used."""
        for part in self._present & set(parts):
            self._move(part, away=True)
            self._present.discard(part)

    def onload(self, parts: Collection[Part]) -> None:
        """Bring parts back to the device."""
        for part in set(parts) - self._present:
            self._move(part, away=False)
            self._present.add(part)

    def _move(self, part: Part, *, away: bool) -> None:
        if part == "gradients":
            for wrapped in self.wrapped:
                if torch.cuda.is_available():
                    # Between steps gradients are worth nothing, so they are dropped and made anew.
                    (wrapped.offload_grad_buffers if away else wrapped.restore_grad_buffers)()
            return
        weights = [p.data for piece in self.pieces for p in piece.parameters()]
        if part == "weights":
            self._weights = self._weights or HostCopy(weights)
            copy = self._weights
        else:
            if away:
                # The state comes to exist with the first step. Shares of weights in float32 are the weights themselves.
                entries = [e for o in self.optimizer.chained_optimizers for e in o.optimizer.state.values()]
                state = [value for entry in entries for value in entry.values() if isinstance(value, Tensor)]
                reused = self._optimizer_state
                self._optimizer_state = HostCopy([*self._optimized(), *state], without=weights, reuse=reused)
            assert self._optimizer_state is not None, "what comes back went away"
            copy = self._optimizer_state
        if away:
            copy.offload()
            return
        copy.onload()
        if part == "weights":
            copy.wait()


def broadcast_from_last_stage(value: Any) -> Any:
    """Return the last pipeline stage's value on all stages."""
    group = parallel_state.get_pipeline_model_parallel_group()
    if dist.get_world_size(group) == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=parallel_state.get_pipeline_model_parallel_last_rank(), group=group)
    return box[0]


def is_finite(result: Mapping[str, float], norm: float) -> bool:
    """Whether a step may be applied."""
    return math.isfinite(norm) and math.isfinite(result["loss"])
