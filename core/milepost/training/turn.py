"""The training half of an iteration: what the controller computes on the whole rollout, between the ranks' turns.

Values, log-probs and advantages each exist at a certain moment; an advantage estimator is called once, as soon as the
inputs it declared exist. Everything that looks across samples happens here, once, so that no rank's share of the batch
can change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor

from milepost.components import AdvantageEstimator, AdvantageInput, AdvantageTraits, Aggregation
from milepost.config.plan import Plan
from milepost.config.schema import ConstantAggregation
from milepost.functional.aggregation import token_weights
from milepost.functional.values import explained_variance
from milepost.samples import Sample
from milepost.training.inputs import AdvantageBatch
from milepost.training.schedule import Schedule, make_schedule
from milepost.training.trainer import Batch, StepResult, Trainer, Want

VALUES: tuple[Want, ...] = ("values",)
LOG_PROBS: tuple[Want, ...] = ("log_probs",)


@dataclass(slots=True)
class Turn:
    """One rollout on its way through training."""

    plan: Plan
    samples: Sequence[Sample]
    batch: Batch
    schedule: Schedule
    rollouts: Tensor
    """[S] int64, which rollout each sample belongs to."""

    @classmethod
    def begin(cls, plan: Plan, samples: Sequence[Sample], cost: Callable[[int], float] | None = None) -> Turn:
        """Lay the samples out as columns, schedule them, and weigh every token.

        `cost` gives the cost of a sample of some length, by which ranks are balanced; default its length.
        """
        batch = make_batch(samples)
        rollouts = torch.tensor([sample.rollout for sample in samples], dtype=torch.int64)
        trainer = plan.config.trainer
        schedule = make_schedule(
            batch.lengths.tolist(),
            rollouts.tolist(),
            data_parallel=plan.data_parallel,
            global_batch_size=plan.global_batch_size,
            steps_per_rollout=plan.steps_per_rollout,
            token_budget=trainer.max_tokens_per_gpu * trainer.context_parallel,
            cost=cost,
            # Interleaved pipeline stages take micro-batches in groups of as many as there are stages.
            interleave=trainer.pipeline_parallel if trainer.virtual_pipeline_parallel > 1 else 1,
            overlong=trainer.overlong,
        )
        turn = cls(plan, samples, batch, schedule, rollouts)
        turn._weigh_tokens()
        return turn

    def _weigh_tokens(self) -> None:
        """Give every token its share of its optimizer step's loss."""
        aggregation = self.plan.config.algorithm.aggregation
        assert aggregation is not None, "planning fills the aggregation in"
        name: Aggregation
        if isinstance(aggregation, ConstantAggregation):
            name, constant = "constant", aggregation.constant
        else:
            name, constant = aggregation, float(self.plan.config.rollout.max_response_len)
        weights = torch.zeros(self.batch.num_tokens)
        for step in self.schedule.steps:
            samples = sorted(step.samples)
            part = self.batch.select(samples, ("mask",))
            weights[self.batch.token_index(samples)] = token_weights(
                part["mask"],
                part.lengths,
                self.rollouts[torch.tensor(samples)],
                aggregation=name,
                global_batch_size=self.plan.global_batch_size,
                constant=constant,
            )
        self.batch["weights"] = weights

    def estimate(self, estimator: AdvantageEstimator) -> None:
        """Fill in `advantages`, and `returns` where there is a critic, if the estimator's inputs exist and it was not
        asked before.
        """
        if "advantages" in self.batch:
            return
        inputs = self._inputs(estimator_inputs(self.plan))
        if inputs is None:
            return
        estimate = estimator.estimate(
            AdvantageBatch(
                lengths=self.batch.lengths,
                mask=self.batch["mask"],
                groups=torch.tensor([sample.group for sample in self.samples], dtype=torch.int64),
                rollouts=self.rollouts,
                inputs=inputs,
            )
        )
        self.batch["advantages"] = estimate.advantages
        if estimate.returns is not None:
            self.batch["returns"] = estimate.returns

    def _inputs(self, names: frozenset[AdvantageInput]) -> dict[str, Tensor] | None:
        """Return what an estimator declared, or None while some of it does not exist."""
        columns = {"values": "values", "log_probs": "old_log_probs", "ref_log_probs": "ref_log_probs"}
        inputs: dict[str, Tensor] = {}
        for name in names:
            if name == "rewards":
                inputs[name] = torch.tensor([sample.reward for sample in self.samples], dtype=torch.float32)
            elif name == "token_rewards":
                inputs[name] = token_rewards(self.samples)
            elif columns[name] in self.batch:
                inputs[name] = self.batch[columns[name]]
            else:
                return None
        return inputs


def make_batch(samples: Sequence[Sample]) -> Batch:
    """Lay samples out as flat columns: tokens, mask, engine_log_probs (0 where not sampled)."""
    engine_log_probs = torch.from_numpy(np.concatenate([sample.log_probs for sample in samples]))
    return Batch(
        torch.tensor([len(sample) for sample in samples], dtype=torch.int64),
        {
            "tokens": torch.from_numpy(np.concatenate([sample.tokens for sample in samples]).astype(np.int32)),
            "mask": torch.from_numpy(np.concatenate([sample.trainable for sample in samples])),
            "engine_log_probs": engine_log_probs.nan_to_num(nan=0.0),
        },
    )


def token_rewards(samples: Sequence[Sample]) -> Tensor:
    """Concatenate the samples' token rewards [N] float32, zero for samples that have none."""
    parts = [np.zeros(len(s), np.float32) if s.token_rewards is None else s.token_rewards for s in samples]
    return torch.from_numpy(np.concatenate(parts))


def train_critic(trainer: Trainer, turn: Turn, estimator: AdvantageEstimator) -> list[StepResult]:
    """The critic's turn: values, advantages and returns, then its own steps."""
    turn.batch["values"] = trainer.forward("critic", turn.schedule, turn.batch, VALUES)["values"]
    turn.estimate(estimator)
    return [trainer.step("critic", step, turn.batch) for step in turn.schedule.steps]


def train_actor(trainer: Trainer, turn: Turn, estimator: AdvantageEstimator, *, first: bool) -> list[StepResult]:
    """The actor's turn: frozen roles' log-probs, old log-probs where they are needed, then its steps.

    On the first rollout the old log-probs are computed although one step per rollout makes them redundant: the step
    then reports how far its own log-probs lie from them (`old_log_prob_diff`), which must be nothing.
    """
    plan, batch, schedule = turn.plan, turn.batch, turn.schedule
    if plan.needs_reference:
        batch["ref_log_probs"] = trainer.forward("reference", schedule, batch, LOG_PROBS)["log_probs"]
    if plan.needs_teacher:
        batch["teacher_log_probs"] = trainer.forward("teacher", schedule, batch, LOG_PROBS)["log_probs"]
    if plan.config.trainer.old_log_probs == "engine":
        batch["old_log_probs"] = batch["engine_log_probs"]
    elif first or needs_old_log_probs(plan):
        batch["old_log_probs"] = trainer.forward("actor", schedule, batch, LOG_PROBS)["log_probs"]
    turn.estimate(estimator)
    return [_with_sample_size(trainer.step("actor", step, batch)) for step in schedule.steps]


def _with_sample_size(result: StepResult) -> StepResult:
    """Replace the mean square of the ratios by the effective sample size: (sum of rho)^2 / (n x sum of rho^2)."""
    metrics = dict(result.metrics)
    square = metrics.pop("ratio_square", 0.0)
    if square > 0.0:
        metrics["effective_sample_size"] = metrics["ratio_mean"] ** 2 / square
    return replace(result, metrics=metrics)


def needs_old_log_probs(plan: Plan) -> bool:
    """Whether the trainer's log-probs are needed before its steps, beyond what the steps themselves compute."""
    asked = plan.config.trainer.old_log_probs == "trainer"
    return asked or plan.steps_per_rollout > 1 or "log_probs" in estimator_inputs(plan)


def estimator_inputs(plan: Plan) -> frozenset[AdvantageInput]:
    """What the plan's advantage estimator reads."""
    traits = cast("AdvantageTraits", plan.advantage.component.traits)
    return traits.reads(plan.advantage.options)


def critic_metrics(batch: Batch) -> Mapping[str, float]:
    """How well the critic's values, as they were before its steps, explain the returns of the rollout."""
    return {"explained_variance": explained_variance(batch["values"], batch["returns"], batch["mask"])}


def advantage_metrics(batch: Batch) -> Mapping[str, float]:
    """Mean, spread and extremes of the advantages over trainable tokens."""
    advantages = batch["advantages"][batch["mask"]]
    if not len(advantages):
        return {}
    metrics = {"advantage_mean": float(advantages.mean()), "advantage_abs": float(advantages.abs().mean())}
    if "returns" in batch:
        metrics["return_mean"] = float(batch["returns"][batch["mask"]].mean())
    return metrics
