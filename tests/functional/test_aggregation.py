"""Golden values 10 and 17 of the formulas, and what several sequences of one rollout weigh."""

import pytest
import torch
from milepost.functional.aggregation import token_weights

X = torch.tensor([1.0, 3.0, 2.0, 2.0, 5.0])
LENGTHS = torch.tensor([2, 3])
ALL = torch.ones(5, dtype=torch.bool)
TWO = torch.arange(2)


@pytest.mark.parametrize(("aggregation", "expected"), [("sample_mean", 2.5), ("token_mean", 2.6), ("constant", 0.65)])
def test_golden(aggregation, expected):
    weights = token_weights(ALL, LENGTHS, TWO, aggregation=aggregation, constant=10.0)
    assert weights.dtype == torch.float32
    assert (weights * X).sum().item() == pytest.approx(expected, rel=1e-7)


def test_golden_sum_of_sample_means():
    weights = token_weights(ALL, LENGTHS, TWO, aggregation="sample_mean")
    assert (weights * X).sum().item() * 2 == pytest.approx(5.0, rel=1e-7)


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean", "constant"])
def test_masked_tokens_weigh_nothing_and_do_not_count(aggregation):
    lengths = torch.tensor([4, 4])
    mask = torch.tensor([False, True, False, True, True, True, True, False])
    weights = token_weights(mask, lengths, TWO, aggregation=aggregation, constant=10.0)
    without = token_weights(ALL, LENGTHS, TWO, aggregation=aggregation, constant=10.0)
    assert torch.equal(weights[mask], without)
    assert weights[~mask].tolist() == [0.0] * 3


def test_sequences_of_one_rollout_share_its_weight():
    # Rollout 4 has sequences of 1 and 3 tokens, rollout 9 one of 2: each rollout weighs 1/2, its tokens alike.
    lengths, rollouts = torch.tensor([1, 2, 3]), torch.tensor([4, 9, 4])
    weights = token_weights(torch.ones(6, dtype=torch.bool), lengths, rollouts, aggregation="sample_mean")
    assert weights.tolist() == [0.125, 0.25, 0.25, 0.125, 0.125, 0.125]


def test_a_rollout_without_trainable_tokens_counts_in_the_batch_size():
    mask = torch.tensor([True, True, False, False, False])
    weights = token_weights(mask, LENGTHS, TWO, aggregation="sample_mean")
    assert weights.tolist() == [0.25, 0.25, 0.0, 0.0, 0.0]
    none = token_weights(torch.zeros(5, dtype=torch.bool), LENGTHS, TWO, aggregation="token_mean")
    assert none.tolist() == [0.0] * 5


def test_global_batch_size_is_taken_where_given():
    weights = token_weights(ALL, LENGTHS, TWO, aggregation="constant", constant=5.0, global_batch_size=4)
    assert weights.tolist() == pytest.approx([0.05] * 5)
    with pytest.raises(ValueError, match="2 rollouts in a step of global_batch_size 1"):
        token_weights(ALL, LENGTHS, TWO, aggregation="sample_mean", global_batch_size=1)


def test_errors():
    with pytest.raises(ValueError, match="constant aggregation divides by a length, got None"):
        token_weights(ALL, LENGTHS, TWO, aggregation="constant")
    with pytest.raises(ValueError, match="unknown aggregation 'median'"):
        token_weights(ALL, LENGTHS, TWO, aggregation="median")
    with pytest.raises(ValueError, match="rollouts holds -1"):
        token_weights(ALL, LENGTHS, torch.tensor([-1, 0]), aggregation="token_mean")
