"""The torch trainer: a Hugging Face model trained on packed micro-batches, alone or by data-parallel ranks.

Ranks hold a copy each and sum their gradients, or share the model out between them (`trainer.sharding`).
"""

from __future__ import annotations

import math
import platform
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from milepost.checkpoint import load_metadata, load_tensors, save_tensors
from milepost.components import Algorithm
from milepost.config.files import resolve_path
from milepost.config.plan import Plan
from milepost.errors import CheckpointError, ConfigError, Problem
from milepost.recipe import Recipe
from milepost.training.inputs import Metric, PolicyInputs, SampleIndex, ValueInputs
from milepost.training.losses import MetricSums, policy_objective, value_objective
from milepost.training.optimizer import OptimizerSettings
from milepost.training.packing import Layout, Packed, pack
from milepost.training.policy import Policy, ValueHead
from milepost.training.ranks import Ranks, SingleRank
from milepost.training.recompute import enable_recompute
from milepost.training.roles import FrozenRole, ShardedFrozenRole, TrainedRole
from milepost.training.schedule import Schedule, StepSchedule
from milepost.training.trainer import Batch, Part, Role, StepResult, Want
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
        sharding = config.trainer.sharding
        self._mesh: DeviceMesh | None = None
        """The ranks that the model is shared out over; None where each has a copy."""
        if self._ranks.size > 1 and (sharding == "full" or (sharding == "auto" and device.type == "cuda")):
            self._mesh = init_device_mesh(device.type, (self._ranks.size,))
        num_steps = plan.num_rollouts * plan.steps_per_rollout
        self._trained: dict[Role, TrainedRole] = {"actor": self._load_trained("actor", plan.model_path, num_steps)}
        if plan.needs_critic:
            path = self._path(config.critic.init_from)
            self._trained["critic"] = self._load_trained("critic", path, num_steps)
        self._frozen: dict[Role, FrozenRole | ShardedFrozenRole] = {}
        if config.checkpoint.init_from is not None:
            self._start_from(self._path(config.checkpoint.init_from) / "trainer")

    def _path(self, text: str | None) -> Path:
        return self._plan.model_path if text is None else resolve_path(text, self._plan.base_dir)

    def _load_trained(self, role: Role, path: Path, num_steps: int) -> TrainedRole:
        config = self._plan.config
        # What is shared out goes to the device layer by layer.
        device = self._device if self._mesh is None else torch.device("cpu")
        model = self._recipe.hf.load(path, self._dtype, device)
        if enable_recompute(model.body, config.trainer.recompute):
            model = replace(model, batch_body=None)
        policy = Policy(model, config.rollout.temperature)
        if role == "critic":
            width = policy.head_weight.shape[1]
            policy.value_head = ValueHead(width, seed=config.run.seed, dtype=self._dtype, device=device)
        settings = OptimizerSettings.of(config.optimizer, num_steps, config.critic if role == "critic" else None)
        return TrainedRole(role, policy, settings, self._device, self._mesh)

    def _start_from(self, folder: Path) -> None:
        """Take weights, and nothing else, from another run's checkpoint; a critic's where that run had one."""
        for role, trained in self._trained.items():
            path = folder / f"{role}.safetensors"
            if role == "actor" or path.exists():
                self._load_weights(path, trained)

    def _frozen_role(self, role: Role) -> FrozenRole | ShardedFrozenRole:
        if role not in self._frozen:
            config = self._plan.config
            path = config.reference.path if role == "reference" else config.teacher.path
            if role == "teacher" and path is None:
                problem = "the algorithm asks a teacher, but none is given; set it to a checkpoint"
                raise ConfigError([Problem("teacher.path", problem)])
            model = self._recipe.hf.load(self._path(path), self._dtype, torch.device("cpu"))
            policy = Policy(model, config.rollout.temperature)
            self._frozen[role] = (
                FrozenRole(policy, self._device)
                if self._mesh is None
                else ShardedFrozenRole(policy, self._device, self._mesh)
            )
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
                if micro_batch or self._mesh is not None:
                    packed = self._pack(batch, micro_batch)
                    for name, values in self._evaluate(policy, packed, want).items():
                        columns[name][packed.columns] = values.to("cpu", torch.float32)

    def _evaluate(self, policy: Policy, packed: Packed, want: Collection[Want]) -> dict[Want, Tensor]:
        """Ask the policy about a row.

        A model that is shared out runs on all ranks equally often, also where a rank has nothing trainable: then over
        a stand-in row, of which nothing is taken and whose gradients are zero.
        """
        if self._mesh is None or len(packed.targets):
            return policy.evaluate(packed, want)
        zero = torch.zeros(1, dtype=torch.int64, device=self._device)
        row = Packed(Layout((2,), self._device), zero.repeat(1, 2), zero + 1, zero, torch.zeros(1, dtype=torch.int64))
        return {name: column[:0] for name, column in policy.evaluate(row, want).items()}

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
        if self._mesh is None:
            # Every rank adds metrics at least once, also one that has nothing but filler.
            micro_batches = tuple(m for m in micro_batches if m) or micro_batches[:1]
        for micro_batch in micro_batches:
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
        columns = self._evaluate(policy, packed, POLICY_COLUMNS)
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
        values = self._evaluate(policy, packed, VALUE_COLUMNS)["values"]

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
        return self._trained_role(role).source()

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and random state of all trained roles into an existing folder.

        Per role `ROLE.safetensors`, `ROLE-optimizer.safetensors`; and `random.safetensors`. The first rank writes, the
        others take part where the model is shared out; another number of ranks, or another sharding, can read it.
        """
        writes = self._ranks.rank == 0
        for role, trained in self._trained.items():
            optimizer = trained.optimizer
            if writes or self._mesh is not None:
                weights, state = optimizer.weights(), optimizer.state()
            if writes:
                save_tensors(folder / f"{role}.safetensors", weights)
                metadata = {"num_steps": str(optimizer.num_steps), "optimizer": optimizer.settings.name}
                save_tensors(folder / f"{role}-optimizer.safetensors", state, metadata)
        if not writes:
            return
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

    def _load_weights(self, path: Path, trained: TrainedRole) -> None:
        saved, names = load_tensors(path), trained.optimizer.names()
        if saved.keys() != names:
            listing = ", ".join(sorted(saved.keys() ^ names)[:3])
            raise CheckpointError(
                f"{path} is of another model (tensors in only one of the two: {listing}); "
                "resume with the model it was saved with"
            )
        trained.optimizer.load_weights(saved)

    def close(self) -> None:
        """Release everything; the trainer is not used again."""
        self._trained.clear()
        self._frozen.clear()


def _trainable_index(packed: Packed) -> SampleIndex:
    """The trainable tokens alone, by sample: masked ones have no part in any loss, so they are left out of it."""
    mask = torch.ones_like(packed.trainable, dtype=torch.bool)
    sample_ids = packed.layout.sample_ids.index_select(0, packed.trainable)
    return SampleIndex(mask, sample_ids, len(packed.layout.lengths))
