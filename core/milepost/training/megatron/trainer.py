"""The Megatron trainer: one rank of a world that shares a model by tensor, pipeline, context and data parallelism."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from milepost.components import Algorithm
from milepost.config.converted import WEIGHTS
from milepost.config.files import resolve_path
from milepost.config.plan import Plan
from milepost.errors import ConfigError, Problem
from milepost.recipe import MegatronHalf, MegatronModel, Recipe
from milepost.training.inputs import Metric, PolicyInputs, SampleIndex, ValueInputs
from milepost.training.logprobs import HeadSettings
from milepost.training.losses import MetricState, MetricSums, policy_objective, value_objective
from milepost.training.megatron import checkpoint, convert, parallel
from milepost.training.megatron.model import PolicyModel, build_pieces, load_hf, transformer_config
from milepost.training.megatron.parallel import Parallelism
from milepost.training.megatron.roles import FrozenRole, TrainedRole, broadcast_from_last_stage, is_finite
from milepost.training.megatron.rows import Row, make_row
from milepost.training.megatron.source import MegatronSource
from milepost.training.optimizer import OptimizerSettings
from milepost.training.schedule import Schedule, StepSchedule
from milepost.training.trainer import Batch, Part, Role, StepResult, Want
from milepost.weights.transport import WeightSource, World

POLICY_COLUMNS: tuple[Want, ...] = ("log_probs", "entropy")
VALUE_COLUMNS: tuple[Want, ...] = ("values",)


class MegatronTrainer:
    """Implements `milepost.training.trainer.Trainer` on every rank of the default process group.

    Where no process group was made, this process is the whole world. The actor is loaded at once, straight from its
    Hugging Face folder or from what that was converted into, the critic if the plan needs one, reference and teacher
    when they are first asked.

    Args:
        plan: the run.
        recipe: its `megatron` half builds models.
        algorithm: gives the policy's and perhaps the critic's loss.
        device: where this rank computes.
        dtype: of the weights; log-probs, losses, gradients and optimizer state are float32 at least.

    Raises:
        ConfigError: the recipe has no Megatron half or cannot read the model's `config.json`, the layout does not fit
            the model, or sampling is greedy, which has no log-probs.
        CheckpointError: the model's folder is not whole, or `checkpoint.init_from` is no checkpoint of this model.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        recipe: Recipe,
        algorithm: Algorithm,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        config = plan.config
        if recipe.megatron is None:
            problem = f"recipe {plan.model.name!r} has no Megatron half; set it to torch, or write one for the recipe"
            raise ConfigError([Problem("trainer.backend", problem)])
        if config.rollout.temperature <= 0:
            problem = f"{config.rollout.temperature} is greedy, which has no log-probs to train on; give more than 0"
            raise ConfigError([Problem("rollout.temperature", problem)])
        self._plan = plan
        self._half: MegatronHalf = recipe.megatron
        self._algorithm = algorithm
        self._device = device
        self._dtype = dtype
        self._parallelism = Parallelism.of(config.trainer)
        parallel.ensure_process_group(device)
        parallel.initialize(self._parallelism, config.run.seed)
        self._coordinates = parallel.coordinates()
        self._head = HeadSettings(config.rollout.temperature)
        num_steps = plan.num_rollouts * plan.steps_per_rollout
        self._trained: dict[Role, TrainedRole] = {"actor": self._load_trained("actor", plan.model_path, num_steps)}
        if plan.needs_critic:
            self._trained["critic"] = self._load_trained("critic", self._path(config.critic.init_from), num_steps)
        self._frozen: dict[Role, FrozenRole] = {}
        self._world = parallel.describe_world(device)
        if config.checkpoint.init_from is not None:
            self._start_from(self._path(config.checkpoint.init_from) / "trainer")

    def _path(self, text: str | None) -> Path:
        return self._plan.model_path if text is None else resolve_path(text, self._plan.base_dir)

    def _describe(self, path: Path) -> MegatronModel:
        """Read a checkpoint's `config.json`, and check that the layout fits the model."""
        try:
            description = self._half.describe(json.loads((path / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError) as error:
            raise ConfigError([Problem("model.path", f"{path}: {error}")]) from error
        problems = layout_problems(description, self._parallelism)
        if problems:
            raise ConfigError(problems)
        return description

    def _load(self, path: Path, *, critic: bool) -> tuple[list[PolicyModel], object]:
        description = self._describe(path)
        config = transformer_config(
            description,
            self._parallelism,
            dtype=self._dtype,
            device=self._device,
            recompute=self._plan.config.trainer.recompute,
        )
        seed = self._plan.config.run.seed
        pieces = build_pieces(description, config, critic=critic, seed=seed, device=self._device)
        converted = self._plan.converted
        if converted is not None and path == self._plan.model_path:
            convert.load_torch_dist(pieces, converted / WEIGHTS)
        else:
            load_hf(pieces, description, path)
        return pieces, config

    def _load_trained(self, role: Role, path: Path, num_steps: int) -> TrainedRole:
        config = self._plan.config
        pieces, transformer = self._load(path, critic=role == "critic")
        settings = OptimizerSettings.of(config.optimizer, num_steps, config.critic if role == "critic" else None)
        return TrainedRole(role, pieces, transformer, settings, self._head)

    def _start_from(self, folder: Path) -> None:
        """Take weights, and nothing else, from another run's checkpoint; a critic's where that run had one."""
        for role, trained in self._trained.items():
            if role == "actor" or (folder / role).exists():
                checkpoint.load_weights(folder / role, trained)

    def _frozen_role(self, role: Role) -> FrozenRole:
        if role not in self._frozen:
            config = self._plan.config
            path = config.reference.path if role == "reference" else config.teacher.path
            if role == "teacher" and path is None:
                problem = "the algorithm asks a teacher, but none is given; set it to a checkpoint"
                raise ConfigError([Problem("teacher.path", problem)])
            pieces, _ = self._load(self._path(path), critic=False)
            self._frozen[role] = FrozenRole(pieces, self._head)
        return self._frozen[role]

    def _trained_role(self, role: Role) -> TrainedRole:
        if role not in self._trained:
            raise ValueError(
                f"role {role!r} is not trained in this run; the trained ones are {', '.join(self._trained)}"
            )
        return self._trained[role]

    @property
    def world(self) -> World:
        """The ranks, where they stand and their parallel coordinates."""
        return self._world

    def forward(self, role: Role, schedule: Schedule, batch: Batch, want: Collection[Want]) -> dict[str, Tensor]:
        """Run the role over the batch with the packing of the training steps, without gradients.

        Returns one flat column [N] float32 per wanted name, on the CPU, holding what this rank has: the columns of all
        ranks add up to the whole, zero where a token is not trainable. Ranks that have nothing of their own return
        nothing: those of other pipeline stages than the last, and all tensor-parallel ranks but the first.

        Raises:
            PhaseError: the role's weights are offloaded.
            ValueError: values were asked of a role that is no critic, or log-probs of a critic.
        """
        columns: dict[str, Tensor] = {name: torch.zeros(batch.num_tokens) for name in want}
        if role in ("reference", "teacher"):
            with self._frozen_role(role) as frozen:
                self._fill(columns, frozen, schedule, batch, want)
        else:
            trained = self._trained_role(role)
            trained.require("weights")
            self._fill(columns, trained, schedule, batch, want)
        speaks = parallel_state.is_pipeline_last_stage(ignore_virtual=True) and self._coordinates.tensor == 0
        return columns if speaks else {}

    def _fill(
        self,
        columns: Mapping[str, Tensor],
        role: TrainedRole | FrozenRole,
        schedule: Schedule,
        batch: Batch,
        want: Collection[Want],
    ) -> None:
        for step in schedule.steps:
            for row, found in role.evaluate(self._rows(step, batch), want):
                for name, values in found.items():
                    columns[name][row.columns] = values.to("cpu", torch.float32)

    def _rows(self, step: StepSchedule, batch: Batch) -> list[Row]:
        tensor = self._parallelism.tensor if self._parallelism.sequence else 1
        return [
            make_row(
                batch,
                samples,
                self._device,
                context=self._parallelism.context,
                rank=self._coordinates.context,
                tensor=tensor,
            )
            for samples in step.ranks[self._coordinates.data]
        ]

    def step(self, role: Role, schedule: StepSchedule, batch: Batch) -> StepResult:
        """Accumulate gradients over the step's micro-batches and apply the optimizer once.

        A loss or gradient that is not finite leaves weights, optimizer and learning-rate schedule as they were.
        Metrics are those of `milepost.training.losses` and `grad_norm` (before clipping) and `lr`, the same on every
        rank.

        Raises:
            PhaseError: a part of the role is offloaded.
            KeyError: the batch lacks a column that the role's loss reads.
        """
        trained = self._trained_role(role)
        trained.require("weights", "gradients", "optimizer")
        sums = MetricSums(self._parallelism.context)

        def loss(model: PolicyModel, hidden: Tensor, row: Row) -> Tensor:
            index = self._index(row)
            objective = self._value_loss if role == "critic" else self._policy_loss
            value, metrics = objective(model, hidden, row, index, batch)
            sums.add(metrics, index)
            # Megatron divides gradients by the step's tokens, which makes auxiliary losses of layers independent of
            # the micro-batches; this loss is whole already.
            return value * schedule.num_tokens

        trained.accumulate(self._rows(schedule, batch), loss)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        result: dict[str, float] = broadcast_from_last_stage(self._reduced(sums) if last else None)
        norm = trained.gradient_norm()
        skipped = not is_finite(result, norm)
        result |= {"grad_norm": norm, "lr": trained.lr}
        if not skipped:
            trained.apply(norm)
        return StepResult(result, skipped)

    def _index(self, row: Row) -> SampleIndex:
        index = row.index()
        if self._parallelism.context == 1:
            return index
        group = parallel_state.get_context_parallel_group()
        return SampleIndex(index.mask, index.sample_ids, index.num_samples, lambda x: parallel.all_reduce_sum(x, group))

    @staticmethod
    def _reduced(sums: MetricSums) -> dict[str, float]:
        state = sums.state()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        operations = (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)
        for part, operation in zip(state, operations, strict=True):
            dist.all_reduce(part, operation, group=group)
        sums.load(MetricState(*state))
        return sums.result()

    def _policy_loss(
        self, model: PolicyModel, hidden: Tensor, row: Row, index: SampleIndex, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Metric]]:
        settings = self._plan.config.algorithm
        columns = model.read(hidden, row, self._head, POLICY_COLUMNS)
        log_probs, entropy = columns["log_probs"], columns["entropy"]
        if settings.entropy_coef == 0.0:
            entropy = entropy.detach()

        def column(name: str) -> Tensor:
            return batch[name][row.columns].to(self._device, log_probs.dtype)

        def optional(name: str) -> Tensor | None:
            return column(name) if name in batch else None

        old_log_probs = optional("old_log_probs")
        inputs = PolicyInputs(
            log_probs=log_probs,
            old_log_probs=log_probs.detach() if old_log_probs is None else old_log_probs,
            advantages=column("advantages"),
            index=index,
            engine_log_probs=optional("engine_log_probs"),
            ref_log_probs=optional("ref_log_probs"),
            teacher_log_probs=optional("teacher_log_probs"),
        )
        return policy_objective(self._algorithm, inputs, column("weights"), settings, entropy)

    def _value_loss(
        self, model: PolicyModel, hidden: Tensor, row: Row, index: SampleIndex, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Metric]]:
        values = model.read(hidden, row, self._head, VALUE_COLUMNS)["values"]

        def column(name: str) -> Tensor:
            return batch[name][row.columns].to(self._device, values.dtype)

        inputs = ValueInputs(
            values=values,
            old_values=column("values"),
            returns=column("returns"),
            value_clip=self._plan.config.critic.value_clip,
            index=index,
        )
        return value_objective(self._algorithm, inputs, column("weights"))

    def offload(self, role: Role, parts: Collection[Part]) -> None:
        """Move these parts of the role to host memory; nothing happens where they are not on the device.

        On a CPU nothing moves, but a part that is offloaded may not be used either. Frozen roles are always offloaded.
        """
        if role in self._trained:
            self._trained[role].offload(parts)

    def onload(self, role: Role, parts: Collection[Part]) -> None:
        """Bring these parts of the role back to the device; frozen roles come when they are asked."""
        if role in self._trained:
            self._trained[role].onload(parts)

    def source(self, role: Role) -> WeightSource:
        """The role's weights under Hugging Face names; a critic's have its value head behind them."""
        trained = self._trained_role(role)
        path = self._path(self._plan.config.critic.init_from) if role == "critic" else self._plan.model_path
        return MegatronSource(trained.pieces, self._describe(path), self._dtype)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and schedule of all trained roles into an existing folder that all ranks see.

        Per role a folder `ROLE` in Megatron's distributed format, which any other layout can load. There is no random
        state to save: nothing is drawn once the roles are loaded.
        """
        for role, trained in self._trained.items():
            checkpoint.save(folder / role, trained)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote, by whatever layout. Raises CheckpointError if it does not fit this run."""
        for role, trained in self._trained.items():
            checkpoint.load(folder / role, trained)

    def close(self) -> None:
        """Release everything; the trainer is not used again. Process groups stay."""
        self._trained.clear()
        self._frozen.clear()


def layout_problems(description: MegatronModel, parallelism: Parallelism) -> list[Problem]:
    """Return what of a model the parallelism does not divide."""
    fields = description.transformer
    experts = fields.get("num_moe_experts")
    shared = 1 if experts else fields["ffn_hidden_size"]
    problems = []
    if parallelism.expert > 1 and not experts:
        problems.append(Problem("trainer.expert_parallel", f"{parallelism.expert}, but the model has no experts"))
    if experts and parallelism.tensor > 1 and not parallelism.sequence:
        problems.append(Problem("trainer.sequence_parallel", "experts with tensor parallelism need it; set it to true"))
    checks: Iterable[tuple[str, str, int, int]] = (
        ("tensor_parallel", "attention heads", fields["num_attention_heads"], parallelism.tensor),
        ("tensor_parallel", "key-value heads", fields["num_query_groups"], parallelism.tensor),
        # Experts are whole on one rank.
        ("tensor_parallel", "feed-forward columns", shared, 1 if experts else parallelism.tensor),
        ("expert_parallel", "experts", experts or parallelism.expert, parallelism.expert),
        ("tensor_parallel", "rows of the padded vocabulary", description.padded_vocab_size, parallelism.tensor),
        ("pipeline_parallel", "layers", fields["num_layers"], parallelism.pipeline),
        (
            "virtual_pipeline_parallel",
            f"layers over {parallelism.pipeline} stages",
            fields["num_layers"] // parallelism.pipeline,
            parallelism.interleave,
        ),
    )
    return problems + [
        Problem(f"trainer.{key}", f"{size} does not divide the model's {count} {what}; choose one that does")
        for key, what, count, size in checks
        if count % size
    ]


def sum_columns(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the whole columns of `MegatronTrainer.forward` from what its ranks returned."""
    total: dict[str, Tensor] = {}
    for part in parts:
        for name, column in part.items():
            total[name] = total[name] + column if name in total else column
    return total
