"""Numbers worked by hand, and every promise of the three kinds."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from milepost.samples import Sample, Task
from milepost.testing import check_advantage, check_algorithm, check_reward
from milepost.training.inputs import AdvantageBatch, PolicyInputs, SampleIndex
from road_signs import (
    SAPOOptions,
    build_sapo,
    milepost_advantages,
    milepost_algorithms,
    milepost_rewards,
)
from road_signs.closeness import Closeness
from road_signs.rank import Rank


def sample(text: str) -> Sample:
    empty = np.zeros(0)
    return Sample(
        task=Task(index=0, prompt="", tokens=(), label="42"),
        tokens=empty.astype(np.int32),
        trainable=empty.astype(np.bool_),
        log_probs=empty.astype(np.float32),
        versions=empty.astype(np.int32),
        text=text,
    )


@pytest.mark.parametrize(
    ("text", "score"),
    [("42", 1.0), ("52", 0.5), ("12 or -8", 1 / 6), ("none", 0.0), ("9" * 10_000, 10 / (10 + 1e15 - 43))],
)
def test_closeness(text: str, score: float) -> None:
    assert Closeness(10.0).score(sample(text))["reward"] == pytest.approx(score, abs=1e-9)


def test_sapo_against_the_paper() -> None:
    log_probs = torch.tensor([math.log(0.2), math.log(0.4), math.log(0.2)], requires_grad=True)
    inputs = PolicyInputs(
        log_probs=log_probs,
        old_log_probs=torch.tensor([math.log(0.2)] * 2 + [math.log(0.4)]),
        advantages=torch.tensor([3.0, 1.0, -1.0]),
        index=SampleIndex(torch.ones(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), 1),
    )
    loss = build_sapo(SAPOOptions(tau_positive=1.0, tau_negative=2.0)).policy_loss(inputs)
    # ratios 1, 2 and 1/2: -4 * 0.5 * 3, -4 sigmoid(1), +2 sigmoid(-1)
    expected = [-6.0, -4 / (1 + math.exp(-1)), 2 / (1 + math.exp(1))]
    torch.testing.assert_close(loss.values, torch.tensor(expected))
    loss.values.sum().backward()
    # on policy that of -A log p; elsewhere times rho and 4 p (1 - p)
    p = 1 / (1 + math.exp(-1))
    gradient = [-3.0, -2 * 4 * p * (1 - p), 0.5 * 4 * p * (1 - p)]
    torch.testing.assert_close(log_probs.grad, torch.tensor(gradient))
    torch.testing.assert_close(loss.metrics["gate"].values, torch.tensor([1.0, 4 * p * (1 - p), 4 * p * (1 - p)]))


def test_ranks() -> None:
    batch = AdvantageBatch(
        lengths=torch.tensor([1, 1, 1, 2, 1]),
        mask=torch.tensor([True, True, True, False, True, True]),
        groups=torch.tensor([0, 0, 0, 0, 1]),
        rollouts=torch.tensor([0, 1, 2, 2, 3]),
        inputs={"rewards": torch.tensor([7.0, 1000.0, -1.0, -1.0, 3.0])},
    )
    # three rollouts: the middle one 0, the best 1, both sequences of the worst -1; a group of one 0
    assert Rank().estimate(batch).advantages.tolist() == [0.0, 1.0, -1.0, 0.0, -1.0, 0.0]


def test_every_promise_is_kept() -> None:
    (reward,), (algorithm,), (advantage,) = milepost_rewards(), milepost_algorithms(), milepost_advantages()
    assert check_reward(reward) == []
    assert check_algorithm(algorithm) == []
    assert check_advantage(advantage) == []
