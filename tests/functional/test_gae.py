"""Golden values 1 to 5 of the formulas, and the vectorised recursion against a plain one in float64."""

import pytest
import torch
from milepost.functional.gae import discounted_sums, gae, reinforce_returns

EXACT = {"rel": 1e-7, "abs": 1e-7}


def one(mask, values, reward, gamma, lam, token_rewards=None):
    mask = torch.tensor(mask, dtype=torch.bool)
    return gae(
        torch.tensor([float(reward)]),
        torch.tensor(values, dtype=torch.float32),
        mask,
        torch.tensor([len(mask)]),
        gamma=gamma,
        lam=lam,
        token_rewards=None if token_rewards is None else torch.tensor(token_rewards),
    )


def plain_gae(rewards, values, mask, lengths, gamma, lam, token_rewards):
    """The recursion as the paper has it, in Python floats, token by token."""
    advantages, offset = [0.0] * sum(lengths), 0
    for reward, length in zip(rewards, lengths, strict=True):
        trained = [t for t in range(offset, offset + length) if mask[t]]
        advantage = next_value = 0.0
        for position, t in enumerate(reversed(trained)):
            r = token_rewards[t] + (reward if position == 0 else 0.0)
            advantage = r + gamma * next_value - values[t] + gamma * lam * advantage
            advantages[t], next_value = advantage, values[t]
        offset += length
    return advantages


@pytest.mark.parametrize("gap", [1, 5])
def test_golden_environment_tokens_take_no_time(gap):
    result = one([1] + [0] * gap + [1], [0.0] * (gap + 2), 2.0, 0.9, 0.5)
    assert result.advantages.tolist() == pytest.approx([0.9] + [0.0] * gap + [2.0], **EXACT)
    assert result.advantages[1 : 1 + gap].tolist() == [0.0] * gap


def test_golden_reward_at_the_last_trainable_token():
    result = one([1, 1, 1, 0, 0], [0.5, -0.2, 0.3, 0.9, 0.9], 10.0, 0.0, 0.0, [0.1, 0.2, 0.3, 7.0, 7.0])
    assert result.advantages.tolist() == pytest.approx([-0.4, 0.4, 10.0, 0.0, 0.0], **EXACT)


def test_golden_undiscounted():
    result = one([1] * 4, [0.4, -0.1, 0.25, 0.6], 1.5, 1.0, 1.0, [0.1, -0.2, 0.3, 0.05])
    assert result.advantages.tolist() == pytest.approx([1.35, 1.75, 1.60, 0.95], **EXACT)
    assert result.returns.tolist() == pytest.approx([1.75, 1.65, 1.85, 1.55], **EXACT)


def test_golden_discounted():
    result = one([1] * 4, [0.1, 0.2, 0.3, 0.4], 0.0, 0.9, 0.8, [0.0, 0.0, 0.0, 1.0])
    assert result.advantages.tolist() == pytest.approx([0.385453, 0.424240, 0.492, 0.6], abs=1e-6)


def test_golden_a_sample_without_a_trainable_token_changes_nothing():
    values = torch.tensor([0.4, -0.1, 0.25, 0.6])
    alone = gae(torch.tensor([1.5]), values, torch.ones(4, dtype=torch.bool), torch.tensor([4]), gamma=0.9, lam=0.9)
    for place in (0, 4):
        mixed = gae(
            torch.tensor([9.0, 1.5] if place == 0 else [1.5, 9.0]),
            torch.cat([values[:place], torch.full((3,), 7.0), values[place:]]),
            torch.tensor([True] * place + [False] * 3 + [True] * (4 - place)),
            torch.tensor([3, 4] if place == 0 else [4, 3]),
            gamma=0.9,
            lam=0.9,
        )
        assert mixed.advantages[place : place + 3].tolist() == [0.0] * 3
        assert mixed.returns[place : place + 3].tolist() == [0.0] * 3
        kept = [*range(place), *range(place + 3, 7)]
        assert torch.equal(mixed.advantages[kept], alone.advantages)
        assert torch.equal(mixed.returns[kept], alone.returns)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.99, 0.9), (1.0, 1.0), (0.0, 0.5), (0.5, 0.0)])
def test_ragged_batch_equals_the_plain_recursion(gamma, lam):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([1, 31, 32, 33, 64, 1, 2000, 63, 65, 7])
    num_tokens = int(lengths.sum())
    mask = torch.rand(num_tokens, generator=generator) < 0.8
    values = torch.randn(num_tokens, generator=generator)
    token_rewards = torch.randn(num_tokens, generator=generator)
    rewards = torch.randn(len(lengths), generator=generator)
    result = gae(rewards, values, mask, lengths, gamma=gamma, lam=lam, token_rewards=token_rewards)
    expected = torch.tensor(
        plain_gae(
            rewards.tolist(), values.tolist(), mask.tolist(), lengths.tolist(), gamma, lam, token_rewards.tolist()
        ),
        dtype=torch.float64,
    )
    assert result.advantages.dtype == torch.float32
    torch.testing.assert_close(result.advantages.double(), expected, rtol=2e-6, atol=2e-6)
    returns = torch.where(mask, expected + values, 0.0)
    torch.testing.assert_close(result.returns.double(), returns, rtol=2e-6, atol=2e-6)


def test_what_stands_at_masked_tokens_does_not_matter():
    mask = [1, 0, 1, 0]
    clean = one(mask, [0.1, 0.0, 0.3, 0.0], 1.0, 0.9, 0.8, [0.0, 0.0, 0.5, 0.0])
    nan = float("nan")
    dirty = one(mask, [0.1, nan, 0.3, float("inf")], 1.0, 0.9, 0.8, [0.0, nan, 0.5, nan])
    assert torch.equal(clean.advantages, dirty.advantages)
    assert torch.equal(clean.returns, dirty.returns)


def test_a_sample_of_zeros_stays_exactly_zero_beside_others():
    result = gae(
        torch.tensor([0.0, 1.0]),
        torch.tensor([0.0] * 70 + [0.3] * 70),
        torch.ones(140, dtype=torch.bool),
        torch.tensor([70, 70]),
        gamma=0.99,
        lam=0.95,
    )
    assert result.advantages[:70].tolist() == [0.0] * 70


def test_non_finite_values_are_named_by_sample():
    with pytest.raises(ValueError, match="sample 2 has a reward or value that is not finite"):
        gae(
            torch.zeros(3),
            torch.tensor([0.0, 0.0, 0.0, float("nan")]),
            torch.ones(4, dtype=torch.bool),
            torch.tensor([1, 2, 1]),
            gamma=1.0,
            lam=1.0,
        )


@pytest.mark.parametrize("name", ["gamma", "lam"])
def test_out_of_range(name):
    with pytest.raises(ValueError, match=rf"{name} is 1.5, expected a number in \[0, 1\]"):
        one([1], [0.0], 1.0, **{"gamma": 1.0, "lam": 1.0, name: 1.5})


def test_lengths_must_cover_the_tokens():
    with pytest.raises(ValueError, match="the lengths sum to 3, but there are 4 tokens"):
        gae(torch.zeros(1), torch.zeros(4), torch.ones(4, dtype=torch.bool), torch.tensor([3]), gamma=1.0, lam=1.0)


def test_empty_batch():
    empty = torch.zeros(0)
    result = gae(empty, empty, empty.bool(), empty.long(), gamma=1.0, lam=1.0)
    assert result.advantages.shape == (0,)


def test_discounted_sums_start_anew_in_every_segment():
    sums = discounted_sums(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([0, 3, 0, 1]), 0.5)
    assert sums.tolist() == [3.0, 4.0, 4.0, 8.0]


def test_reinforce_returns():
    mask = torch.tensor([True, False, True, True, False])
    kl = torch.tensor([0.5, 99.0, 1.0, 0.25, 99.0])
    result = reinforce_returns(torch.tensor([2.0]), mask, torch.tensor([5]), gamma=0.5, kl=kl, beta=0.1)
    # r = [-.05, -.1, -.025 + 2]; G = [-.05 + .5 * .8875, -.1 + .5 * 1.975, 1.975]
    assert result.tolist() == pytest.approx([0.39375, 0.0, 0.8875, 1.975, 0.0], rel=1e-6)


def test_reinforce_returns_without_kl_are_the_reward():
    result = reinforce_returns(torch.tensor([2.0, 3.0]), torch.ones(3, dtype=torch.bool), torch.tensor([2, 1]))
    assert result.tolist() == [2.0, 2.0, 3.0]


def test_a_million_tokens_are_exact():
    # What they cost is benchmarks/gae.py's matter.
    generator = torch.Generator().manual_seed(0)
    num_samples, num_tokens = 4096, 1_000_000
    shares = torch.empty(num_samples).log_normal_(0.0, 0.8, generator=generator)
    lengths = (shares / shares.sum() * num_tokens).long().clamp(min=1)
    lengths[0] += num_tokens - lengths.sum()
    values = torch.randn(num_tokens, generator=generator) * 0.3 + 0.5
    rewards = torch.randint(0, 2, (num_samples,), generator=generator).float()
    mask = torch.rand(num_tokens, generator=generator) < 0.9
    result = gae(rewards, values, mask, lengths, gamma=1.0, lam=0.95)
    expected = plain_gae(
        rewards.tolist(), values.tolist(), mask.tolist(), lengths.tolist(), 1.0, 0.95, [0.0] * num_tokens
    )
    error = (result.advantages.double() - torch.tensor(expected, dtype=torch.float64)).abs().max().item()
    assert error < 2e-5
