"""Golden values 12 and 15 of the formulas; rollouts of several sequences; whitening (11)."""

import pytest
import torch
from milepost.functional.group import group_advantages, group_statistics, leave_one_out_advantages
from milepost.functional.reinforce import baseline_advantages
from milepost.functional.whitening import whiten

RANGE4 = torch.arange(4)
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def test_golden_with_std():
    result = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), ONE_GROUP, RANGE4)
    assert result.dtype == torch.float32
    assert result.tolist() == pytest.approx([0.866024, -0.866024, -0.866024, 0.866024], abs=1e-6)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-30, -7.3])
@pytest.mark.parametrize("normalize_std", [True, False])
def test_equal_rewards_give_exactly_zero(reward, normalize_std):
    rewards = torch.full((7,), reward)
    groups = torch.zeros(7, dtype=torch.int64)
    result = group_advantages(rewards, groups, torch.arange(7), normalize_std=normalize_std)
    assert result.tolist() == [0.0] * 7


def test_equal_rewards_in_float64_have_no_deviation_from_rounding():
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    groups, rollouts = torch.zeros(3, dtype=torch.int64), torch.arange(3)
    statistics = group_statistics(rewards, groups, rollouts)
    assert statistics.std.tolist() == [0.0] * 3
    assert group_advantages(rewards, groups, rollouts, normalize_std=False).tolist() == [0.0] * 3


def test_golden_without_std():
    result = group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), ONE_GROUP, RANGE4, normalize_std=False)
    assert result.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_golden_leave_one_out():
    result = leave_one_out_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), ONE_GROUP, RANGE4)
    assert result.tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3], rel=1e-7)


def test_groups_of_one_are_zero():
    rewards = torch.tensor([5.0, 1.0, 3.0])
    groups = torch.tensor([7, 2, 2])
    rollouts = torch.arange(3)
    assert group_advantages(rewards, groups, rollouts)[0].item() == 0.0
    assert leave_one_out_advantages(rewards, groups, rollouts).tolist() == [0.0, -2.0, 2.0]
    assert group_statistics(rewards, groups, rollouts).std[0].item() == 0.0


def test_interleaved_groups_are_compared_with_their_own():
    rewards = torch.tensor([1.0, 10.0, 0.0, 30.0])
    result = group_advantages(rewards, torch.tensor([3, 1, 3, 1]), RANGE4, normalize_std=False)
    assert result.tolist() == [0.5, -10.0, -0.5, 10.0]


def test_sequences_of_one_rollout_count_once():
    # Rollout 5 has three sequences; the group is [1, 0], not [1, 1, 1, 0].
    rewards = torch.tensor([1.0, 1.0, 0.0, 1.0])
    rollouts = torch.tensor([5, 5, 6, 5])
    assert group_advantages(rewards, ONE_GROUP, rollouts, normalize_std=False).tolist() == [0.5, 0.5, -0.5, 0.5]
    statistics = group_statistics(rewards, ONE_GROUP, rollouts)
    assert statistics.size.tolist() == [2.0] * 4
    assert statistics.std.tolist() == pytest.approx([0.5**0.5] * 4)
    assert leave_one_out_advantages(rewards, ONE_GROUP, rollouts).tolist() == [1.0, 1.0, -1.0, 1.0]


def test_sequences_of_one_rollout_must_agree():
    with pytest.raises(ValueError, match="sample 2 has another reward than the rest of its rollout 5"):
        group_advantages(torch.tensor([1.0, 0.0, 2.0, 0.0]), ONE_GROUP, torch.tensor([5, 6, 5, 7]))
    with pytest.raises(ValueError, match="sample 1 has another group than the rest of its rollout 5"):
        group_advantages(torch.ones(2), torch.tensor([0, 1]), torch.tensor([5, 5]))


def test_rewards_must_be_finite_and_ids_assigned():
    with pytest.raises(ValueError, match="the reward of sample 1 is nan"):
        group_advantages(torch.tensor([1.0, float("nan")]), torch.zeros(2, dtype=torch.int64), torch.arange(2))
    with pytest.raises(ValueError, match="groups holds -1; ids must be 0 or more"):
        group_advantages(torch.ones(2), torch.full((2,), -1), torch.arange(2))


def test_golden_reinforce_baseline():
    rewards, lengths = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([1, 2, 1, 1])
    mask = torch.tensor([True, True, False, True, True])
    result = baseline_advantages(rewards, ONE_GROUP, RANGE4, mask, lengths)
    assert result.tolist() == [0.75, -0.25, 0.0, -0.25, -0.25]
    kl = torch.tensor([0.5, 1.0, float("nan"), 0.0, -1.0])
    result = baseline_advantages(rewards, ONE_GROUP, RANGE4, mask, lengths, kl=kl, beta=0.5)
    assert result.tolist() == [0.5, -0.75, 0.0, -0.25, 0.25]


def test_golden_whitening():
    x = torch.tensor([1.0, 2.0, 99.0, 3.0, 4.0])
    result = whiten(x, torch.tensor([True, True, False, True, True]))
    assert result.tolist() == pytest.approx([-1.161895, -0.387298, 0.0, 0.387298, 1.161895], abs=1e-6)


def test_whitening_ignores_whatever_is_masked():
    mask = torch.tensor([True, False, True])
    result = whiten(torch.tensor([1.0, float("nan"), 3.0]), mask)
    assert result.tolist() == pytest.approx([-(0.5**0.5), 0.0, 0.5**0.5])


@pytest.mark.parametrize("count", [0, 1, 5])
def test_whitening_of_equal_or_too_few_values_is_zero(count):
    mask = torch.arange(6) < count
    assert whiten(torch.full((6,), 0.1), mask).tolist() == [0.0] * 6


def test_whitening_keeps_its_digits_far_from_zero():
    pattern = [1000.0, 1000.25, 1000.5, 1001.75, 1000.0, 1000.0, 1000.0]
    mean = sum(pattern) / 7
    std = (sum((x - mean) ** 2 for x in pattern) / 7) ** 0.5
    x = torch.tensor(pattern).repeat(100_000)
    result = whiten(x, torch.ones_like(x, dtype=torch.bool))
    assert result[:7].tolist() == pytest.approx([(x - mean) / std for x in pattern], abs=1e-5)
