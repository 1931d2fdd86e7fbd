"""Golden values 7, 8, 9, 14 of the formulas, and where gradients do and do not flow."""

import math

import pytest
import torch
from milepost.functional.clipping import cispo_loss, clipped_policy_loss
from milepost.functional.ratios import (
    effective_sample_size,
    importance_factor,
    log_prob_difference,
    mask_factor,
    ratio,
    sequence_difference,
    truncate_factor,
)
from milepost.training.inputs import SampleIndex

INF, NAN = math.inf, math.nan


def test_extreme_differences_give_finite_zeros():
    old = torch.tensor([-1000.0, 1000.0, NAN, INF, -INF])
    new = torch.zeros(5, requires_grad=True)
    rho = ratio(log_prob_difference(old, new))
    assert rho.tolist() == pytest.approx([math.exp(20), math.exp(-20), 1.0, 1.0, 1.0], rel=1e-6)
    loss = clipped_policy_loss(rho, torch.zeros(5), 0.2, 0.2).values
    assert loss.tolist() == [0.0] * 5
    loss.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [0.0] * 5


def test_ratio_is_one_where_the_difference_is_not_finite_without_gradient():
    old = torch.tensor([NAN, INF, -INF, 0.1])
    new = torch.zeros(4, requires_grad=True)
    rho = ratio(log_prob_difference(old, new))
    assert rho[:3].tolist() == [1.0, 1.0, 1.0]
    rho.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([0.0, 0.0, 0.0, math.exp(-0.1)])


def test_ratio_of_a_difference_that_is_not_finite_is_one():
    assert ratio(torch.tensor([NAN, INF, -INF])).tolist() == [1.0, 1.0, 1.0]


def test_ratio_is_exactly_one_on_policy():
    log_probs = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 10
    assert torch.equal(ratio(log_prob_difference(log_probs, log_probs)), torch.ones(1000))


def test_dual_clip_golden():
    loss = clipped_policy_loss(torch.tensor([2.0, 2.0, 0.5]), torch.tensor([2.0, -2.0, 2.0]), 0.2, 0.2, 1.5)
    assert loss.values.tolist() == pytest.approx([-2.4, 3.0, -1.0], rel=1e-7)
    assert loss.clipped.tolist() == [True, False, False]
    assert loss.dual_clipped.tolist() == [False, True, False]


def test_the_upper_clip_is_its_own():
    rho = torch.tensor([1.25, 1.25, 0.75, 0.75], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0])
    loss = clipped_policy_loss(rho, advantages, 0.2, 0.28)
    assert loss.values.tolist() == pytest.approx([-1.25, 1.25, -0.75, 0.8])
    loss.values.sum().backward()
    assert rho.grad is not None
    assert rho.grad.tolist() == [-1.0, 1.0, -1.0, 0.0]
    assert loss.clipped.tolist() == [False, False, False, True]


def test_no_gradient_where_the_dual_clip_took_over():
    rho = torch.tensor([9.0], requires_grad=True)
    clipped_policy_loss(rho, torch.tensor([-1.0]), 0.2, 0.2, 3.0).values.sum().backward()
    assert rho.grad is not None
    assert rho.grad.tolist() == [0.0]


def test_dual_clip_of_one_or_less_is_refused():
    with pytest.raises(ValueError, match=r"dual_clip is 1\.0, expected a number over 1"):
        clipped_policy_loss(torch.ones(1), torch.ones(1), 0.2, 0.2, 1.0)


def test_cispo_golden_without_gradient_through_the_ratio():
    log_probs = torch.tensor([-0.7, -1.2, -0.4, -2.1], requires_grad=True)
    rho = torch.tensor([1.0, 1.14, 1.56, 0.4], requires_grad=True)
    loss = cispo_loss(rho, torch.tensor([1.0, -0.5, 2.0, -1.0]), log_probs, 0.2, 0.28)
    assert loss.tolist() == pytest.approx([0.7, -0.684, 1.024, -1.68], rel=1e-6)
    loss.sum().backward()
    assert rho.grad is None
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == pytest.approx([-1.0, 0.57, -2.56, 0.8], rel=1e-6)


def test_gspo_golden():
    difference = torch.tensor([0.2, -0.1, 9.0, 0.2])
    new = torch.zeros(4, requires_grad=True)
    index = SampleIndex(torch.tensor([True, True, False, True]), torch.zeros(4, dtype=torch.int64), 1)
    d_seq = sequence_difference(log_prob_difference(difference, new), index.sample_mean)
    rho = ratio(d_seq)
    assert rho.tolist() == pytest.approx([0.904837] * 4, abs=1e-6)
    loss = clipped_policy_loss(rho, torch.ones(4), 3e-4, 4e-4).values
    (torch.where(index.mask, loss, 0.0) / 3).sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == pytest.approx([-0.301612, -0.301612, 0.0, -0.301612], abs=1e-6)


def test_tis_clips_and_icepop_zeroes():
    trainer = torch.tensor([0.0, -1.0, -1.0, -1.0, -1.0], requires_grad=True)
    engine = torch.tensor([0.0, -1.0 - math.log(4), -1.0 + math.log(4), NAN, -1.0 - math.log(1.5)])
    factor = importance_factor(trainer, engine)
    assert not factor.requires_grad
    assert factor.tolist() == pytest.approx([1.0, 4.0, 0.25, 1.0, 1.5])
    assert truncate_factor(factor, 0.5, 2.0).tolist() == pytest.approx([1.0, 2.0, 0.5, 1.0, 1.5])
    assert mask_factor(factor, 0.5, 2.0).tolist() == pytest.approx([1.0, 0.0, 0.0, 1.0, 1.5])


def test_shapes_are_checked_first():
    with pytest.raises(ValueError, match=r"expected flat tensors of one length \[N\], got .* \(2,\), .* \(3,\)"):
        log_prob_difference(torch.zeros(2), torch.zeros(3))
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        clipped_policy_loss(torch.zeros(1, 2), torch.zeros(1, 2), 0.2, 0.2)


def test_effective_sample_size():
    mask = torch.tensor([True, True, True, True, False])
    assert effective_sample_size(torch.tensor([2.0, 2.0, 2.0, 2.0, 9.0]), mask) == 1.0
    assert effective_sample_size(torch.tensor([1.0, 0.0, 0.0, 0.0, 9.0]), mask) == 0.25
    assert effective_sample_size(torch.tensor([1.0, 3.0, 0.0, 0.0, 9.0]), mask) == pytest.approx(16 / 40)
    assert math.isnan(effective_sample_size(torch.zeros(5), mask))
