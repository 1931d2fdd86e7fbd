"""The torch trainer: a Hugging Face model trained on packed micro-batches, one copy on every data-parallel rank."""

from __future__ import annotations

import math
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from milepost.checkpoint import load_metadata, load_tensors, save_tensors
from milepost.components import Algorithm
from milepost.config.files import resolve_path
from milepost.config.plan import Plan
from milepost.errors import CheckpointError, ConfigError, Problem
from milepost.recipe import Recipe
from milepost.training.inputs import Metric, PolicyInputs, SampleIndex, ValueInputs
from milepost.training.losses import MetricSums, policy_objective, value_objective
from milepost.training.optimizer import OptimizerSettings, copy_checked
from milepost.training.packing import Packed, pack
from milepost.training.ranks import Ranks, SingleRank
from milepost.training.recompute import enable_recompute
from milepost.training.roles import FrozenRole, Policy, TrainedRole, ValueHead
from milepost.training.schedule import Schedule, StepSchedule
from milepost.training.trainer import Batch, Part, Role, StepResult, Want
from milepost.weights.source import ModuleSource
from milepost.weights.transport import RankInfo, WeightSource, World

RANDOM_STATE = "random.safetensors"
POLICY_COLUMNS: tuple[Want, ...] = ("log_probs", "entropy")
VALUE_COLUMNS: tuple[Want, ...] = ("values",)


class TorchTrainer:
    """Implements `milepost.training.trainer.Trainer` for one rank, alone or among data-parallel ranks.

    The actor is loaded at once, the critic if the plan needs one, reference and teacher when they are first asked.
    Among several ranks each has its own instance, all calls are made on all of them, and each looks only at its own
    entry of a schedule, so that its batch need hold no other samples.

    Args:
        plan: the run.
        recipe: its `hf` half loads checkpoints.
        algorithm: gives the policy's and perhaps the critic's loss.
        device: where to compute.
        dtype: of the weights; log-probs, losses and optimizer state are float32 at least.
        ranks: the ranks this one belongs to; default it is alone.

    Raises:
        ConfigError: the plan asks for another number of ranks, or for greedy sampling, which has no log-probs.
        CheckpointError: `checkpoint.init_from` is no checkpoint of this model.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        recipe: Recipe,
        algorithm: Algorithm,
        device: torch.device,
        dtype: torch.dtype,
        ranks: Ranks | None = None,
    ) -> None:
        config = plan.config
        self._ranks: Ranks = SingleRank() if ranks is None else ranks
        if plan.world_size != self._ranks.size:
            problem = f"the plan has {plan.world_size} ranks, the torch trainer was started on {self._ranks.size}"
            raise ConfigError([Problem("trainer.backend", problem)])
        if config.rollout.temperature <= 0:
            problem = f"{config.rollout.temperature} is greedy, which has no log-probs to train on; give more than 0"
            raise ConfigError([Problem("rollout.temperature", problem)])
        self._plan = plan
        self._recipe = recipe
        self._algorithm = algorithm
        self._device = device
        self._dtype = dtype
        num_steps = plan.num_rollouts * plan.steps_per_rollout
        self._trained: dict[Role, TrainedRole] = {"actor": self._load_trained("actor", plan.model_path, num_steps)}
        if plan.needs_critic:
            path = self._path(config.critic.init_from)
            self._trained["critic"] = self._load_trained("critic", path, num_steps)
        self._frozen: dict[Role, FrozenRole] = {}
        if config.checkpoint.init_from is not None:
            self._start_from(self._path(config.checkpoint.init_from) / "trainer")

    def _path(self, text: str | None) -> Path:
        return self._plan.model_path if text is None else resolve_path(text, self._plan.base_dir)

    def _load_trained(self, role: Role, path: Path, num_steps: int) -> TrainedRole:
        config = self._plan.config
        model = self._recipe.hf.load(path, self._dtype, self._device)
        if enable_recompute(model.body, config.trainer.recompute):
            model = replace(model, batch_body=None)
        policy = Policy(model, config.rollout.temperature)
        if role == "critic":
            width = policy.head_weight.shape[1]
            policy.value_head = ValueHead(width, seed=config.run.seed, dtype=self._dtype, device=self._device)
        settings = OptimizerSettings.of(config.optimizer, num_steps, config.critic if role == "critic" else None)
        return TrainedRole(role, policy, settings, self._device)

    def _start_from(self, folder: Path) -> None:
        """Take weights, and nothing else, from another run's checkpoint; a critic's where that run had one."""
        for role, trained in self._trained.items():
            path = folder / f"{role}.safetensors"
            if role == "actor" or path.exists():
                self._load_weights(path, trained)

    def _frozen_role(self, role: Role) -> FrozenRole:
        if role not in self._frozen:
            config = self._plan.config
            path = config.reference.path if role == "reference" else config.teacher.path
            if role == "teacher" and path is None:
                problem = "the algorithm asks a teacher, but none is given; set it to a checkpoint"
                raise ConfigError([Problem("teacher.path", problem)])
            model = self._recipe.hf.load(self._path(path), self._dtype, torch.device("cpu"))
            self._frozen[role] = FrozenRole(Policy(model, config.rollout.temperature), self._device)
        return self._frozen[role]

    def _trained_role(self, role: Role) -> TrainedRole:
        if role not in self._trained:
            raise ValueError(
                f"role {role!r} is not trained in this run; the trained ones are {', '.join(self._trained)}"
            )
        return self._trained[role]

    @property
    def world(self) -> World:
        """This rank alone; where there are several, each knows only itself."""
        device = "cpu"
        if self._device.type == "cuda":
            device = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
        rank = self._ranks.rank
        return World((RankInfo(rank, node=platform.node(), device=device, data=rank),))

    @torch.no_grad()
    def forward(self, role: Role, schedule: Schedule, batch: Batch, want: Collection[Want]) -> dict[str, Tensor]:
        """Run the role over this rank's samples with the packing of the training steps, without gradients.

        Returns one flat column [N] float32 per wanted name, on the CPU, zero where a token is not trainable or belongs
        to another rank.

        Raises:
            PhaseError: the role's weights are offloaded.
            ValueError: values were asked of a role that is no critic.
        """
        columns: dict[str, Tensor] = {name: torch.zeros(batch.num_tokens) for name in want}
        if role in ("reference", "teacher"):
            with self._frozen_role(role) as policy:
                self._fill(columns, policy, schedule, batch, want)
        else:
            trained = self._trained_role(role)
            trained.require("weights")
            self._fill(columns, trained.policy, schedule, batch, want)
        return columns

    def _fill(
        self, columns: dict[str, Tensor], policy: Policy, schedule: Schedule, batch: Batch, want: Collection[Want]
    ) -> None:
        for step in schedule.steps:
            for micro_batch in step.ranks[self._ranks.rank]:
                if micro_batch:
                    packed = self._pack(batch, micro_batch)
                    for name, values in policy.evaluate(packed, want).items():
                        columns[name][packed.columns] = values.to("cpu", torch.float32)

    def _pack(self, batch: Batch, samples: Sequence[int]) -> Packed:
        # GPU kernels read ragged rows as they are; on a CPU a little padding is cheaper than regrouping.
        return pack(batch, samples, self._device, pad=self._device.type == "cpu")

    def step(self, role: Role, schedule: StepSchedule, batch: Batch) -> StepResult:
        """Accumulate gradients over the step's micro-batches and apply the optimizer once.

        A loss or gradient that is not finite leaves weights, optimizer and learning-rate schedule as they were.
        Metrics are those of `milepost.training.losses` and `grad_norm` (before clipping) and `lr`.

        Raises:
            PhaseError: a part of the role is offloaded.
            KeyError: the batch lacks a column that the role's loss reads.
        """
        trained = self._trained_role(role)
        trained.require("weights", "gradients", "optimizer")
        optimizer = trained.optimizer
        optimizer.zero_gradients()
        sums = MetricSums()
        micro_batches = schedule.ranks[self._ranks.rank]
        # Every rank adds metrics at least once, also one that has nothing but filler.
        for micro_batch in [m for m in micro_batches if m] or micro_batches[:1]:
            packed = self._pack(batch, micro_batch)
            index = _trainable_index(packed)
            objective = self._policy_loss if role == "actor" else self._value_loss
            loss, metrics = objective(trained.policy, packed, index, batch)
            sums.add(metrics, index)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
        self._ranks.sum_gradients(optimizer.gradients())
        sums.load(self._ranks.combine_metrics(sums.state()))
        result = sums.result()
        norm = optimizer.gradient_norm()
        skipped = not (math.isfinite(norm) and math.isfinite(result["loss"]))
        result |= {"grad_norm": norm, "lr": optimizer.lr}
        if not skipped:
            optimizer.step(norm)
        return StepResult(result, skipped)

    def _policy_loss(
        self, policy: Policy, packed: Packed, index: SampleIndex, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Metric]]:
        settings = self._plan.config.algorithm
        columns = policy.evaluate(packed, POLICY_COLUMNS)
        log_probs, entropy = columns["log_probs"], columns["entropy"]
        if settings.entropy_coef == 0.0:
            entropy = entropy.detach()

        def column(name: str) -> Tensor:
            return batch[name][packed.columns].to(self._device, log_probs.dtype)

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
        self, policy: Policy, packed: Packed, index: SampleIndex, batch: Batch
    ) -> tuple[Tensor, Mapping[str, Metric]]:
        values = policy.evaluate(packed, VALUE_COLUMNS)["values"]

        def column(name: str) -> Tensor:
            return batch[name][packed.columns].to(self._device, values.dtype)

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
        policy = self._trained_role(role).policy
        head = policy.value_head
        extra = {} if head is None else {f"value_head.{name}": p for name, p in head.named_parameters()}
        return ModuleSource(policy.hf.model, extra)

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and random state of all trained roles into an existing folder.

        Per role `ROLE.safetensors`, `ROLE-optimizer.safetensors`; and `random.safetensors`. All ranks hold the same,
        so the first one writes, and another number of ranks can read it.
        """
        if self._ranks.rank != 0:
            return
        for role, trained in self._trained.items():
            save_tensors(folder / f"{role}.safetensors", trained.weights())
            metadata = {"num_steps": str(trained.optimizer.num_steps), "optimizer": trained.optimizer.settings.name}
            save_tensors(folder / f"{role}-optimizer.safetensors", trained.optimizer.state(), metadata)
        random = {"cpu": torch.get_rng_state()}
        if self._device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self._device)
        save_tensors(folder / RANDOM_STATE, random)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError if it does not fit this run."""
        for role, trained in self._trained.items():
            self._load_weights(folder / f"{role}.safetensors", trained)
            path = folder / f"{role}-optimizer.safetensors"
            metadata = load_metadata(path)
            name = trained.optimizer.settings.name
            if metadata["optimizer"] != name:
                raise CheckpointError(
                    f"{path} is of optimizer {metadata['optimizer']!r}, this run's is {name!r}; set optimizer.name to "
                    "what it was, or start a new run with checkpoint.init_from"
                )
            trained.optimizer.load_state(load_tensors(path), int(metadata["num_steps"]))
        random = load_tensors(folder / RANDOM_STATE)
        torch.set_rng_state(random["cpu"])
        if self._device.type == "cuda" and "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"], self._device)

    @torch.no_grad()
    def _load_weights(self, path: Path, trained: TrainedRole) -> None:
        saved, present = load_tensors(path), trained.weights()
        if saved.keys() != present.keys():
            listing = ", ".join(sorted(saved.keys() ^ present.keys())[:3])
            raise CheckpointError(
                f"{path} is of another model (tensors in only one of the two: {listing}); "
                "resume with the model it was saved with"
            )
        for name, tensor in present.items():
            copy_checked(tensor, saved[name], name)
        trained.optimizer.refresh_masters()

    def close(self) -> None:
        """Release everything; the trainer is not used again."""
        self._trained.clear()
        self._frozen.clear()


def _trainable_index(packed: Packed) -> SampleIndex:
    """The trainable tokens alone, by sample: masked ones have no part in any loss, so they are left out of it."""
    mask = torch.ones_like(packed.trainable, dtype=torch.bool)
    sample_ids = packed.layout.sample_ids.index_select(0, packed.trainable)
    return SampleIndex(mask, sample_ids, len(packed.layout.lengths))
