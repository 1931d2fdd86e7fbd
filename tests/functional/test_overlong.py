"""DAPO's soft overlong punishment, by hand from equation 13."""

import pytest
from milepost.functional.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0.0), (16384, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0), (20481, -1.0), (99999, -1.0)],
)
def test_the_papers_setting(length, expected):
    # L_max 20480, L_cache 4096
    assert overlong_penalty(length, 20480, 4096) == expected
    assert overlong_penalty(length, 20480, 4096, penalty=0.5) == expected / 2


def test_a_buffer_as_long_as_the_limit_begins_at_the_first_token():
    assert overlong_penalty(1, 4, 4) == -0.25


@pytest.mark.parametrize("buffer", [0, 5])
def test_a_buffer_out_of_range_is_refused(buffer):
    with pytest.raises(ValueError, match="expected 1 to the length limit 4"):
        overlong_penalty(1, 4, buffer)
