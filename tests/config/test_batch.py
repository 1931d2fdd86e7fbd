from __future__ import annotations

import pytest
from milepost.config.batch import BatchIdentity, solve_batch
from milepost.errors import Problem


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        # One side missing: prompts, samples, global batch, steps.
        ((None, 8, 32, 2), (8, 8, 32, 2)),
        ((8, None, 32, 2), (8, 8, 32, 2)),
        ((8, 8, None, 2), (8, 8, 32, 2)),
        ((8, 8, 32, None), (8, 8, 32, 2)),
        # All four, and the identity holds.
        ((8, 8, 32, 2), (8, 8, 32, 2)),
        # Two missing: one step per rollout decides.
        ((8, 8, None, None), (8, 8, 64, 1)),
        ((None, 8, 32, None), (4, 8, 32, 1)),
        ((8, None, 32, None), (8, 4, 32, 1)),
        ((1, 1, None, None), (1, 1, 1, 1)),
    ],
)
def test_missing_side_is_filled_in(given: tuple[int | None, ...], expected: tuple[int, ...]) -> None:
    assert solve_batch(*given) == BatchIdentity(*expected)


@pytest.mark.parametrize(
    ("given", "path", "parts"),
    [
        ((8, 8, 48, None), "trainer.global_batch_size", ("8 x", "= 64 rollouts", "64 = 1 x 48 + 16")),
        ((8, 8, None, 3), "trainer.steps_per_rollout", ("= 64 rollouts", "64 = 21 x 3 + 1")),
        ((None, 8, 12, 3), "rollout.samples_per_prompt", ("= 36 rollouts", "36 = 4 x 8 + 4")),
        ((5, None, 32, 1), "rollout.batch_size", ("= 32 rollouts", "32 = 6 x 5 + 2")),
        ((5, None, 32, None), "rollout.batch_size", ("steps_per_rollout 1 (its default)", "32 = 6 x 5 + 2")),
        # More rollouts per step than a rollout has: not zero steps.
        ((2, 4, 16, None), "trainer.global_batch_size", ("= 8 rollouts", "8 = 0 x 16 + 8")),
        ((8, 8, 32, 3), "trainer.global_batch_size", ("= 64 rollouts", "= 96")),
    ],
)
def test_remainder_is_refused_with_its_arithmetic(
    given: tuple[int | None, ...], path: str, parts: tuple[str, ...]
) -> None:
    problem = solve_batch(*given)
    assert isinstance(problem, Problem)
    assert problem.path == path
    for part in parts:
        assert part in problem.message


@pytest.mark.parametrize(
    ("given", "missing", "known"),
    [
        ((None, None, None, None), ("rollout.batch_size", "trainer.global_batch_size"), "none of the four"),
        ((8, None, None, None), ("rollout.samples_per_prompt", "trainer.global_batch_size"), "rollout.batch_size 8"),
        ((None, None, 32, 2), ("rollout.batch_size", "rollout.samples_per_prompt"), "trainer.global_batch_size 32"),
        ((8, None, None, 4), ("rollout.samples_per_prompt",), "rollout.batch_size 8, trainer.steps_per_rollout 4"),
    ],
)
def test_too_little_is_an_error_that_says_what_is_missing(
    given: tuple[int | None, ...], missing: tuple[str, ...], known: str
) -> None:
    problem = solve_batch(*given)
    assert isinstance(problem, Problem)
    decides, _, rest = problem.message.partition("; given: ")
    assert all(path in decides for path in missing)
    assert rest.startswith(known)
