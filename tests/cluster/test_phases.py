"""The order of one colocated iteration."""

from __future__ import annotations

import pytest
from milepost.cluster.phases import Phase, Phases
from milepost.errors import PhaseError

HAND_OVER = (Phase.OFFLOAD, Phase.WAKE, Phase.PUSH, Phase.SERVE)


def walk(phases: Phases, *order: Phase) -> None:
    for phase in order:
        with phases(phase):
            pass


def test_the_iteration_of_the_design_is_allowed() -> None:
    phases = Phases()
    walk(phases, *HAND_OVER, Phase.EVALUATE)
    walk(phases, Phase.GENERATE, Phase.SLEEP, Phase.CRITIC, Phase.ACTOR, Phase.SAVE, *HAND_OVER)
    walk(phases, Phase.GENERATE, Phase.SLEEP, Phase.ACTOR, *HAND_OVER, Phase.EVALUATE)
    assert phases.current is Phase.EVALUATE


@pytest.mark.parametrize(
    ("before", "phase"),
    [
        ((), Phase.GENERATE),  # engines hold no weights before the first push
        ((*HAND_OVER, Phase.GENERATE), Phase.ACTOR),  # engines still hold the memory
        ((*HAND_OVER, Phase.GENERATE, Phase.SLEEP, Phase.ACTOR), Phase.PUSH),  # optimizer state still on the device
        ((*HAND_OVER, Phase.GENERATE, Phase.SLEEP, Phase.ACTOR), Phase.CRITIC),  # the critic goes first
        ((Phase.OFFLOAD,), Phase.PUSH),  # the engine's weights have no memory yet
        ((Phase.OFFLOAD, Phase.WAKE, Phase.PUSH), Phase.GENERATE),  # the KV cache is still away
    ],
)
def test_a_step_out_of_order_is_an_error_naming_what_may_come(before: tuple[Phase, ...], phase: Phase) -> None:
    phases = Phases()
    walk(phases, *before)
    with pytest.raises(PhaseError, match=rf"phase '{phase.value}' came after '{phases.current.value}'.*followed by "):
        walk(phases, phase)


def test_seconds_are_counted_per_phase_and_taken_once() -> None:
    phases = Phases()
    walk(phases, *HAND_OVER)
    assert set(phases.take_seconds()) == set(HAND_OVER)
    assert phases.take_seconds() == {}
