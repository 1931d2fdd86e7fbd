"""Golden value 16 of the formulas, and explained variance."""

import math

import pytest
import torch
from milepost.functional.values import clipped_value_loss, explained_variance


def test_golden_value_loss():
    loss = clipped_value_loss(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]), 0.2)
    assert loss.item() == pytest.approx(0.64, rel=1e-7)


def test_no_gradient_beyond_the_clip_but_one_on_the_way_back():
    values = torch.tensor([0.5, 0.5, 0.1], requires_grad=True)
    loss = clipped_value_loss(values, torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), 0.2)
    assert loss.tolist() == pytest.approx([0.64, 2.25, 0.81])
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0.0, 3.0, -1.8])


def test_explained_variance():
    returns = torch.tensor([1.0, 2.0, 3.0, 99.0])
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(returns, returns, mask) == 1.0
    assert explained_variance(torch.full((4,), 5.0), returns, mask) == 0.0
    assert explained_variance(-returns, returns, mask) == pytest.approx(-3.0)
    assert math.isnan(explained_variance(returns, torch.ones(4), mask))
    assert math.isnan(explained_variance(returns, returns, torch.tensor([True, False, False, False])))
