"""The group advantage through the registry."""

import pytest
import torch
from milepost.registry import current, resolve
from milepost.testing import check_advantage
from milepost.training.inputs import AdvantageBatch


def batch():
    """A group of [1, 0] and one of equal rewards, two to three tokens a sample."""
    return AdvantageBatch(
        lengths=torch.tensor([2, 3, 2, 2]),
        mask=torch.tensor([0, 1, 0, 1, 1, 1, 1, 0, 1], dtype=torch.bool),
        groups=torch.tensor([0, 0, 1, 1]),
        rollouts=torch.arange(4),
        inputs={"rewards": torch.tensor([1.0, 0.0, 0.3, 0.3])},
    )


def test_every_trainable_token_has_its_samples_advantage():
    estimate = resolve("advantage", "group").estimate(batch())
    half = 0.5 / (0.5**0.5 + 1e-6)
    assert estimate.advantages.tolist() == pytest.approx([0, half, 0, -half, -half, 0, 0, 0, 0], rel=1e-6)
    assert estimate.returns is None


def test_without_the_deviation():
    estimate = resolve("advantage", "group", {"normalize_std": False}).estimate(batch())
    assert estimate.advantages.tolist() == [0.0, 0.5, 0.0, -0.5, -0.5, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_keeps_every_promise(normalize_std):
    assert check_advantage("group", {"normalize_std": normalize_std}) == []


def test_traits():
    traits = current().get("advantage", "group").component.traits
    assert traits.inputs == {"rewards"}
    assert traits.group
    assert not traits.returns
