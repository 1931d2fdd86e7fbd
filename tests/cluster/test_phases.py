"""The order of one iteration."""

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


def test_engines_of_their_own_neither_sleep_nor_are_made_room_for() -> None:
    phases = Phases(colocated=False)
    walk(phases, Phase.PUSH, Phase.EVALUATE)
    walk(phases, Phase.GENERATE, Phase.CRITIC, Phase.ACTOR, Phase.SAVE, Phase.PUSH)
    walk(phases, Phase.GENERATE, Phase.ACTOR, Phase.PUSH, Phase.GENERATE)
    for phase in (Phase.SLEEP, Phase.PUSH, Phase.OFFLOAD):
        with pytest.raises(PhaseError, match="followed by actor, critic, save"):
            walk(phases, phase)


def test_each_phase_that_went_through_is_told() -> None:
    told: list[Phase] = []
    phases = Phases(on_end=told.append)
    walk(phases, Phase.OFFLOAD, Phase.WAKE)
    with pytest.raises(OSError, match="in the push"), phases(Phase.PUSH):
        raise OSError("in the push")
    assert told == [Phase.OFFLOAD, Phase.WAKE]


def test_seconds_are_counted_per_phase_and_taken_once() -> None:
    phases = Phases()
    walk(phases, *HAND_OVER)
    assert set(phases.take_seconds()) == set(HAND_OVER)
    assert phases.take_seconds() == {}
