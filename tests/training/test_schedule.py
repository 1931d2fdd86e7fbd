import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from milepost.errors import ConfigError
from milepost.training.schedule import Schedule, StepSchedule, make_schedule


def test_two_ranks_by_hand() -> None:
    # LPT: 9 -> rank 0, 7 -> rank 1, 6 -> rank 1 (13), 5 -> rank 0 (14), 2 -> rank 1 (15), 1 -> rank 0 (15).
    schedule = make_schedule(
        [1, 9, 2, 7, 5, 6],
        [0, 1, 2, 3, 4, 5],
        data_parallel=2,
        global_batch_size=6,
        steps_per_rollout=1,
        token_budget=10,
    )
    # Rank 0 holds 9, 5, 1 and rank 1 holds 7, 6, 2: two micro-batches of ten tokens each.
    assert schedule == Schedule((StepSchedule((((1,), (0, 4)), ((2, 5), (3,))), 30),))


def test_sequences_of_one_rollout_share_a_step() -> None:
    schedule = make_schedule(
        [4, 4, 4, 4, 4],
        [7, 3, 7, 5, 9],
        data_parallel=1,
        global_batch_size=2,
        steps_per_rollout=2,
        token_budget=100,
    )
    assert [sorted(step.samples) for step in schedule.steps] == [[0, 1, 2], [3, 4]]
    assert [step.num_tokens for step in schedule.steps] == [12, 8]


def test_filler_makes_counts_equal_and_a_multiple_of_the_interleaving_group() -> None:
    schedule = make_schedule(
        [10, 1], [0, 1], data_parallel=3, global_batch_size=2, steps_per_rollout=1, token_budget=10, interleave=4
    )
    assert schedule.steps[0].ranks == (((0,), (), (), ()), ((1,), (), (), ()), ((), (), (), ()))


def test_cost_rules_over_length() -> None:
    # Squared: 16 | 9 + 4 + 1; linear would pair 4 + 1 and 3 + 2.
    schedule = make_schedule(
        [4, 3, 2, 1],
        [0, 1, 2, 3],
        data_parallel=2,
        global_batch_size=4,
        steps_per_rollout=1,
        token_budget=100,
        cost=lambda length: length**2,
    )
    assert schedule.steps[0].ranks == (((0,),), ((1, 2, 3),))


def test_a_tight_budget_falls_back_to_first_fit() -> None:
    # 6 4 3 3 2 2 into two bins of ten: spreading by cost would put 6 3 | 4 3 2 and leave no room for the last 2.
    schedule = make_schedule(
        [6, 4, 3, 3, 2, 2], list(range(6)), data_parallel=1, global_batch_size=6, steps_per_rollout=1, token_budget=10
    )
    sizes = [sum([6, 4, 3, 3, 2, 2][i] for i in micro_batch) for micro_batch in schedule.steps[0].ranks[0]]
    assert sizes == [10, 10]


def test_an_overlong_sample_rides_alone_with_a_warning() -> None:
    schedule = make_schedule(
        [30, 2, 3], [0, 1, 2], data_parallel=1, global_batch_size=3, steps_per_rollout=1, token_budget=10
    )
    assert schedule.steps[0].ranks == (((0,), (1, 2)),)
    assert "1 of 3 samples have more than the 10 tokens" in schedule.warnings[0]
    assert "longest 30" in schedule.warnings[0]


def test_an_overlong_sample_can_be_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.max_tokens_per_gpu: 1 of 1 samples"):
        make_schedule(
            [11],
            [0],
            data_parallel=1,
            global_batch_size=1,
            steps_per_rollout=1,
            token_budget=10,
            overlong="error",
        )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rollouts": [0, 1, 1]}, r"2 rollouts were given, expected 1 steps x 3 = 3"),
        ({"rollouts": [0, 1]}, r"3 lengths and 2 rollout ids"),
        ({"lengths": [1, 0, 2]}, r"sample 1 has 0 tokens"),
        ({"token_budget": 0}, r"token_budget is 0"),
        ({"interleave": 0}, r"interleave is 0"),
    ],
)
def test_nonsense_is_an_error(arguments: dict[str, object], message: str) -> None:
    good = {
        "lengths": [1, 2, 3],
        "rollouts": [0, 1, 2],
        "data_parallel": 1,
        "global_batch_size": 3,
        "steps_per_rollout": 1,
        "token_budget": 8,
    }
    with pytest.raises(ValueError, match=message):
        make_schedule(**(good | arguments))


@settings(max_examples=200, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=60),
    fan_out=st.integers(1, 3),
    data_parallel=st.integers(1, 5),
    budget=st.integers(5, 60),
    interleave=st.integers(1, 3),
    steps=st.integers(1, 3),
)
def test_every_sample_is_somewhere_once(
    lengths: list[int], fan_out: int, data_parallel: int, budget: int, interleave: int, steps: int
) -> None:
    rollouts = [i // fan_out for i in range(len(lengths))]
    count = len(set(rollouts))
    if count % steps:
        steps = 1
    schedule = make_schedule(
        lengths,
        rollouts,
        data_parallel=data_parallel,
        global_batch_size=count // steps,
        steps_per_rollout=steps,
        token_budget=budget,
        interleave=interleave,
    )
    assert sorted(i for step in schedule.steps for i in step.samples) == list(range(len(lengths)))
    assert bool(schedule.warnings) == (max(lengths) > budget)
    for step in schedule.steps:
        assert len(step.ranks) == data_parallel
        counts = {len(rank) for rank in step.ranks}
        assert len(counts) == 1
        assert counts.pop() % interleave == 0
        assert step.num_tokens == sum(lengths[i] for i in step.samples)
        for rank in step.ranks:
            for micro_batch in rank:
                assert sum(lengths[i] for i in micro_batch) <= budget or len(micro_batch) == 1
                assert list(micro_batch) == sorted(micro_batch)
        totals = [sum(lengths[i] for micro_batch in rank for i in micro_batch) for rank in step.ranks]
        assert max(totals) - min(totals) <= max(lengths)  # what LPT guarantees


def test_sixteen_thousand_samples_over_128_ranks() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(8.7, 0.7, 16384), 64, 32768).astype(int).tolist()
    schedule = make_schedule(
        lengths,
        list(range(16384)),
        data_parallel=128,
        global_batch_size=16384,
        steps_per_rollout=1,
        token_budget=65536,
    )
    totals = [sum(lengths[i] for micro_batch in rank for i in micro_batch) for rank in schedule.steps[0].ranks]
    assert max(totals) / (sum(totals) / 128) < 1.02
    assert len(schedule.steps[0].ranks[0]) <= -(-max(totals) // 65536) + 1
