"""The order of one iteration as a state machine with names.

Colocated engines and trainer share the same memory, so a step out of order would end in running out of it. Here it is
an error that says which step came and which could have. Every phase is timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum

from milepost.errors import PhaseError


class Phase(StrEnum):
    """What the run is doing; the values appear in logs and metrics."""

    START = "start"
    GENERATE = "generate"
    """Engines hold weights and KV cache."""
    SLEEP = "sleep"
    """Engines release weights, KV cache and graphs."""
    CRITIC = "critic"
    """The critic is on the device: values, then its steps; then it leaves."""
    ACTOR = "actor"
    """The actor is on the device: log-probs, then its steps."""
    SAVE = "save"
    """Everything a resume needs goes to disk; an interrupt comes here from wherever it is waiting."""
    OFFLOAD = "offload"
    """Optimizer state, gradients and frozen roles leave the device; the actor's weights stay."""
    WAKE = "wake"
    """Engines take their weights' memory back."""
    PUSH = "push"
    SERVE = "serve"
    """The actor's weights leave, KV cache and graphs come back."""
    EVALUATE = "evaluate"


_COLOCATED: dict[Phase, frozenset[Phase]] = {
    Phase.START: frozenset({Phase.OFFLOAD}),
    Phase.GENERATE: frozenset({Phase.SLEEP, Phase.SAVE}),
    Phase.SLEEP: frozenset({Phase.CRITIC, Phase.ACTOR, Phase.SAVE}),
    Phase.CRITIC: frozenset({Phase.ACTOR, Phase.SAVE, Phase.OFFLOAD}),
    Phase.ACTOR: frozenset({Phase.SAVE, Phase.OFFLOAD}),
    Phase.SAVE: frozenset({Phase.OFFLOAD, Phase.SAVE}),
    Phase.OFFLOAD: frozenset({Phase.WAKE}),
    Phase.WAKE: frozenset({Phase.PUSH}),
    Phase.PUSH: frozenset({Phase.SERVE}),
    Phase.SERVE: frozenset({Phase.EVALUATE, Phase.GENERATE, Phase.SAVE}),
    Phase.EVALUATE: frozenset({Phase.GENERATE, Phase.SAVE}),
}
_APART: dict[Phase, frozenset[Phase]] = {
    Phase.START: frozenset({Phase.PUSH}),
    Phase.GENERATE: frozenset({Phase.CRITIC, Phase.ACTOR, Phase.SAVE}),
    Phase.CRITIC: frozenset({Phase.ACTOR, Phase.SAVE, Phase.PUSH}),
    Phase.ACTOR: frozenset({Phase.SAVE, Phase.PUSH}),
    Phase.SAVE: frozenset({Phase.PUSH, Phase.SAVE}),
    Phase.PUSH: frozenset({Phase.EVALUATE, Phase.GENERATE, Phase.SAVE}),
    Phase.EVALUATE: frozenset({Phase.GENERATE, Phase.SAVE}),
}
"""Engines on devices of their own: nobody makes room for anybody."""


class Phases:
    """Where the run is, which phases may come next, and how long each took.

    Args:
        colocated: engines and trainer take turns on the same devices; otherwise nobody sleeps, wakes or makes room.
        on_end: called with each phase that went through.
    """

    def __init__(self, *, colocated: bool = True, on_end: Callable[[Phase], object] | None = None) -> None:
        self.current = Phase.START
        self._follows = _COLOCATED if colocated else _APART
        self._on_end = on_end
        self.seconds: dict[Phase, float] = {}
        """Seconds spent in each phase since the last `take_seconds`."""

    @contextmanager
    def __call__(self, phase: Phase) -> Iterator[None]:
        """Be in a phase. Raises PhaseError if it may not follow the last one."""
        allowed = self._follows[self.current]
        if phase not in allowed:
            choices = ", ".join(sorted(allowed))
            raise PhaseError(
                f"phase {phase.value!r} came after {self.current.value!r}, which may be followed by {choices}"
            )
        self.current = phase
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - begin
        if self._on_end is not None:
            self._on_end(phase)

    def take_seconds(self) -> dict[Phase, float]:
        """Return the seconds per phase since the last call, and start counting anew."""
        taken, self.seconds = self.seconds, {}
        return taken
