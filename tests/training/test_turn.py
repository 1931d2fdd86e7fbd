"""What the controller computes between generation and the push."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from milepost.components import AdvantageInput, AdvantageTraits, Component, NoOptions
from milepost.config.loading import load_config
from milepost.config.plan import Choice, Plan, make_plan
from milepost.samples import Sample, Task
from milepost.training.inputs import AdvantageBatch, Estimate
from milepost.training.turn import Turn, make_batch, needs_old_log_probs

Write = Callable[..., Path]
F = False
T = True


def sample(trainable: list[bool], *, group: int, rollout: int, reward: float = 0.0) -> Sample:
    count = len(trainable)
    mask = np.array(trainable)
    return Sample(
        task=Task(0, "p", (0,)),
        tokens=np.arange(count, dtype=np.int32),
        trainable=mask,
        log_probs=np.where(mask, np.float32(-1.5), np.float32(np.nan)),
        versions=np.where(mask, 0, -1).astype(np.int32),
        group=group,
        rollout=rollout,
        rewards={"reward": reward},
    )


SAMPLES = [
    sample([F, T], group=0, rollout=0, reward=1.0),
    sample([F, T, T, F, T], group=0, rollout=1),  # an environment token in the middle
    sample([F, F, T, T], group=1, rollout=2),
    sample([F, T, T, T, T], group=1, rollout=3, reward=1.0),
]


class Recorder:
    """An estimator that notes what it was given."""

    def __init__(self) -> None:
        self.batches: list[AdvantageBatch] = []

    def estimate(self, batch: AdvantageBatch) -> Estimate:
        self.batches.append(batch)
        return Estimate(batch.spread(torch.arange(1.0, 1 + len(batch.lengths))))


@pytest.fixture
def plan(write_config: Write) -> Plan:
    path = write_config(rollout={"batch_size": 2, "samples_per_prompt": 2}, trainer={"steps_per_rollout": 2})
    return make_plan(load_config([path]))


def with_inputs(plan: Plan, *inputs: AdvantageInput) -> Plan:
    """Return the plan with an estimator that declares these inputs."""
    component = Component("recorder", NoOptions, AdvantageTraits(frozenset(inputs)), lambda _: Recorder(), "Notes.")
    return replace(plan, advantage=Choice(component, NoOptions(), "test"))


def test_every_token_weighs_its_share_of_its_own_step(plan: Plan) -> None:
    turn = Turn.begin(plan, SAMPLES)
    # two steps of two rollouts each; sample mean: 1 / (trainable tokens of the sample x 2)
    assert [sorted(step.samples) for step in turn.schedule.steps] == [[0, 1], [2, 3]]
    expected = [0, 1 / 2, 0, 1 / 6, 1 / 6, 0, 1 / 6, 0, 0, 1 / 4, 1 / 4, 0, 1 / 8, 1 / 8, 1 / 8, 1 / 8]
    assert turn.batch["weights"].tolist() == pytest.approx(expected)


def test_an_interleaved_pipeline_takes_micro_batches_in_groups_of_its_stages(plan: Plan) -> None:
    def counts(**layout: int) -> list[int]:
        trainer = plan.config.trainer.model_copy(update={"max_tokens_per_gpu": 6, **layout})
        turned = Turn.begin(replace(plan, config=plan.config.model_copy(update={"trainer": trainer})), SAMPLES)
        return [len(step.ranks[0]) for step in turned.schedule.steps]

    # Two and five tokens, then four and five: two micro-batches of at most six tokens a step.
    assert counts(pipeline_parallel=3) == [2, 2]
    assert counts(pipeline_parallel=3, virtual_pipeline_parallel=2) == [3, 3]


def test_a_constant_aggregation_divides_by_its_length(plan: Plan, write_config: Write) -> None:
    def weights(aggregation: str) -> list[float]:
        path = write_config(
            rollout={"batch_size": 2, "samples_per_prompt": 2},
            trainer={"steps_per_rollout": 1},
            algorithm={"aggregation": aggregation},
        )
        return Turn.begin(make_plan(load_config([path])), SAMPLES).batch["weights"][:2].tolist()

    assert weights("constant") == pytest.approx([0, 1 / (4 * 16)])  # max_response_len is 16
    assert weights({"constant": 10}) == pytest.approx([0, 1 / 40])  # type: ignore[arg-type]
    assert weights("token_mean") == pytest.approx([0, 1 / 10])


def test_samples_become_columns_token_by_token() -> None:
    batch = make_batch(SAMPLES[:2])
    assert batch.lengths.tolist() == [2, 5]
    assert batch["tokens"].tolist() == [0, 1, 0, 1, 2, 3, 4]
    assert batch["mask"].tolist() == [F, T, F, T, T, F, T]
    assert batch["engine_log_probs"].tolist() == [0, -1.5, 0, -1.5, -1.5, 0, -1.5]


def test_an_estimator_is_called_once_as_soon_as_its_inputs_exist(plan: Plan) -> None:
    turn, estimator = Turn.begin(with_inputs(plan, "rewards", "values"), SAMPLES), Recorder()
    turn.estimate(estimator)
    assert estimator.batches == []
    assert "advantages" not in turn.batch
    turn.batch["values"] = torch.full((turn.batch.num_tokens,), 0.5)
    turn.estimate(estimator)
    turn.estimate(estimator)
    (batch,) = estimator.batches
    assert batch.rewards.tolist() == [1, 0, 0, 1]
    assert batch.groups.tolist() == [0, 0, 1, 1]
    assert batch.values.tolist() == [0.5] * 16
    with pytest.raises(AttributeError, match="'log_probs' is not in this batch; declare it"):
        _ = batch.log_probs
    assert turn.batch["advantages"].tolist() == [0, 1, 0, 2, 2, 0, 2, 0, 0, 3, 3, 0, 4, 4, 4, 4]


def test_token_rewards_are_zero_where_none_were_given(plan: Plan) -> None:
    turn, estimator = Turn.begin(with_inputs(plan, "token_rewards"), SAMPLES), Recorder()
    turn.samples[1].token_rewards = np.array([0, 0, 0.25, 0, 0], np.float32)
    turn.estimate(estimator)
    turn.samples[1].token_rewards = None
    assert estimator.batches[0].token_rewards.tolist() == [0, 0, 0, 0, 0.25, *[0] * 11]


def test_old_log_probs_are_needed_with_several_steps_or_when_the_estimator_reads_them(plan: Plan) -> None:
    assert needs_old_log_probs(plan)  # two steps per rollout
    one_step = replace(plan, steps_per_rollout=1)
    assert not needs_old_log_probs(one_step)
    assert needs_old_log_probs(with_inputs(one_step, "rewards", "log_probs"))


def test_at_most_forty_bytes_per_token_pass_the_controller(plan: Plan) -> None:
    turn = Turn.begin(plan, SAMPLES)
    floats = ("old_log_probs", "ref_log_probs", "teacher_log_probs", "values", "advantages", "returns")
    for name in floats:
        turn.batch[name] = torch.zeros(turn.batch.num_tokens)
    # tokens int32, mask bool, engine log-probs and weights, and the six above
    assert turn.batch.bytes_per_token == 4 + 1 + 4 + 4 + 6 * 4
    assert turn.batch.bytes_per_token <= 40
