"""The batch identity: batch_size x samples_per_prompt = global_batch_size x steps_per_rollout."""

from __future__ import annotations

from dataclasses import dataclass

from milepost.errors import Problem

PATHS = {
    "batch_size": "rollout.batch_size",
    "samples_per_prompt": "rollout.samples_per_prompt",
    "global_batch_size": "trainer.global_batch_size",
    "steps_per_rollout": "trainer.steps_per_rollout",
}


@dataclass(frozen=True, slots=True)
class BatchIdentity:
    """Four numbers for which the identity holds."""

    batch_size: int
    """Prompts per rollout."""
    samples_per_prompt: int
    global_batch_size: int
    """Rollouts (sequences, without fan-out) per optimizer step."""
    steps_per_rollout: int
    """Optimizer steps per rollout."""


def solve_batch(
    batch_size: int | None,
    samples_per_prompt: int | None,
    global_batch_size: int | None,
    steps_per_rollout: int | None,
) -> BatchIdentity | Problem:
    """Fill in whichever number is missing, or say why that cannot be done.

    `steps_per_rollout` is 1 where nothing else decides it. A remainder is a problem: no sample is ever dropped.
    """
    given = {
        "batch_size": batch_size,
        "samples_per_prompt": samples_per_prompt,
        "global_batch_size": global_batch_size,
        "steps_per_rollout": steps_per_rollout,
    }
    notes = dict.fromkeys(given, "")
    if steps_per_rollout is None and None in (batch_size, samples_per_prompt, global_batch_size):
        given["steps_per_rollout"] = 1
        notes["steps_per_rollout"] = " (its default)"
    missing = [name for name, value in given.items() if value is None]
    if len(missing) > 1:
        known = ", ".join(f"{PATHS[name]} {value}" for name, value in given.items() if value and not notes[name])
        message = (
            "batch_size x samples_per_prompt = global_batch_size x steps_per_rollout does not decide "
            f"{' and '.join(PATHS[name] for name in missing)}; given: {known or 'none of the four'}; give one more"
            + ("" if len(missing) == 2 else " or two")
        )
        return Problem(PATHS[missing[0]], message)
    sides = (("batch_size", "samples_per_prompt"), ("global_batch_size", "steps_per_rollout"))
    if not missing:
        left, right = (_product(given, side) for side in sides)
        if left != right:
            message = (
                f"{_terms(given, sides[0], notes)} = {left} rollouts, but {_terms(given, sides[1], notes)} = {right}; "
                "the two must be equal: change one of the four, or leave one out"
            )
            return Problem(PATHS["global_batch_size"], message)
        return BatchIdentity(**{name: value for name, value in given.items() if value is not None})
    name = missing[0]
    whole_side = sides[1] if name in sides[0] else sides[0]
    other = next(term for side in sides if name in side for term in side if term != name)
    total, divisor = _product(given, whole_side), given[other]
    assert divisor is not None
    quotient, remainder = divmod(total, divisor)
    if remainder or quotient == 0:
        message = (
            f"{_terms(given, whole_side, notes)} = {total} rollouts, which {PATHS[other]} {divisor}{notes[other]} does "
            f"not divide ({total} = {quotient} x {divisor} + {remainder}); no {PATHS[name]} makes both sides equal"
        )
        return Problem(PATHS[other], message)
    given[name] = quotient
    return BatchIdentity(**{key: value for key, value in given.items() if value is not None})


def _product(given: dict[str, int | None], side: tuple[str, str]) -> int:
    product = 1
    for name in side:
        product *= given[name] or 1
    return product


def _terms(given: dict[str, int | None], side: tuple[str, str], notes: dict[str, str]) -> str:
    return " x ".join(f"{PATHS[name]} {given[name]}{notes[name]}" for name in side)
