"""Golden values 6 and 7 of the formulas."""

import math

import pytest
import torch
from milepost.functional.kl import KL_ESTIMATORS, kl_divergence

GOLDEN = {
    "k1": [0.5, -1.0, 0.0],
    "k2": [0.125, 0.5, 0.0],
    "k3": [0.106531, 0.718282, 0.0],
    "low_var_kl": [0.106531, 0.718282, 0.0],
}


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_golden(estimator):
    log_probs, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    assert kl_divergence(log_probs, ref, estimator).tolist() == pytest.approx(GOLDEN[estimator], abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_gradient_is_the_derivative(estimator):
    log_probs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0, -0.5])
    kl_divergence(log_probs, ref, estimator).sum().backward()
    derivative = {"k1": lambda x: 1.0, "k2": lambda x: x, "k3": lambda x: 1.0 - math.exp(-x)}[estimator]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([derivative(x) for x in (0.5, -1.0, 0.0)], abs=1e-6)


def test_low_var_kl_is_finite_and_bounded_whatever_comes():
    x = torch.tensor([-1000.0, 1000.0, math.nan, math.inf, -math.inf, -20.0], requires_grad=True)
    kl = kl_divergence(x, torch.zeros(6), "low_var_kl")
    assert kl.tolist() == [10.0, 10.0, 0.0, 0.0, 0.0, 10.0]
    kl.sum().backward()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_low_var_kl_keeps_its_digits_near_zero():
    x = 1e-3
    kl = kl_divergence(torch.tensor([x]), torch.zeros(1), "low_var_kl")
    assert kl.item() == pytest.approx(math.exp(-x) - 1 + x, rel=1e-3)


def test_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; expected one of k1, k2, k3, low_var_kl"):
        kl_divergence(torch.zeros(1), torch.zeros(1), "k4")
