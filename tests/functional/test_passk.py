import random
from itertools import combinations

import pytest
from milepost.functional.passk import pass_at_k


@pytest.mark.parametrize(
    ("num_samples", "num_correct", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 1 - C(3,2)/C(4,2) = 1 - 3/6
        (5, 2, 3, 9 / 10),  # 1 - C(3,3)/C(5,3) = 1 - 1/10
        (10, 3, 5, 11 / 12),  # 1 - C(7,5)/C(10,5) = 1 - 21/252
        (16, 0, 8, 0.0),
        (16, 16, 1, 1.0),
        (16, 9, 8, 1.0),  # every eight of the sixteen hold a correct one
        (1, 1, 1, 1.0),
    ],
)
def test_by_hand(num_samples, num_correct, k, expected):
    assert pass_at_k(num_samples, num_correct, k) == expected


def test_is_the_share_of_subsets_with_a_correct_one():
    draw = random.Random(0)
    for _ in range(20):
        n = draw.randint(1, 9)
        c, k = draw.randint(0, n), draw.randint(1, n)
        subsets = list(combinations(range(n), k))
        assert pass_at_k(n, c, k) == sum(min(s) < c for s in subsets) / len(subsets)


def test_many_samples_stay_exact():
    assert pass_at_k(4096, 1, 2048) == 0.5


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 0), (4, 1, 5), (0, 0, 1)])
def test_out_of_range(n, c, k):
    with pytest.raises(ValueError, match="expected"):
        pass_at_k(n, c, k)
