"""Prompts and samples: what a rollout produces and everything else reads.

A `Sample` is a masked token sequence, not a prompt and a response: a conversation with tool calls is one sample whose
environment tokens are not trainable. All per-token arrays have one entry per token of the sequence and entry t is about
token t (its log-prob given the tokens before it); where an entry makes no sense it is NaN, -1 or False.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

UNSHAPED = "unshaped"
"""Name under which the reward as it was scored is kept, where the kernel changed the one trained on."""


class Status(StrEnum):
    """How the generation of a sample ended."""

    COMPLETED = "completed"
    """The end token or a stop string was reached."""
    TRUNCATED = "truncated"
    """The length limit was reached."""
    ABORTED = "aborted"
    """The engine was told to stop; never trained on."""


@dataclass(frozen=True, slots=True)
class Task:
    """One row of a dataset, ready to generate from."""

    index: int
    """Row number in the dataset, before shuffling."""
    prompt: str
    """The text the model sees, after prefix, suffix and chat template."""
    tokens: tuple[int, ...]
    label: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Sample:
    """One token sequence with what the engine and the reward said about it. T is its number of tokens."""

    task: Task
    tokens: NDArray[np.int32]
    """[T] token ids, prompt included."""
    trainable: NDArray[np.bool_]
    """[T] True where the policy sampled the token; the end token is included."""
    log_probs: NDArray[np.float32]
    """[T] engine log-prob of each sampled token under logits / temperature; NaN elsewhere."""
    versions: NDArray[np.int32]
    """[T] weight version that sampled the token; -1 elsewhere."""
    status: Status = Status.COMPLETED
    text: str = ""
    """What was sampled, decoded, special tokens included only where they are ordinary text (`</think>`)."""
    group: int = -1
    """Samples of one prompt share a group id."""
    rollout: int = -1
    """Sequences that belong to one rollout (fan-out of an agent) share a rollout id and its weight."""
    rewards: dict[str, float] = field(default_factory=dict)
    """Named rewards; `reward` is the one trained on."""
    token_rewards: NDArray[np.float32] | None = None
    """[T] rewards given at single tokens, beside the outcome reward."""
    metadata: dict[str, Any] = field(default_factory=dict)
    extras: dict[str, Any] = field(default_factory=dict)
    """References to large data (images, routing decisions); they never pass the controller."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def reward(self) -> float:
        """The reward trained on."""
        return self.rewards["reward"]

    @property
    def score(self) -> float:
        """The reward as it was scored, before the kernel shaped it (`reward.overlong`)."""
        return self.rewards.get(UNSHAPED, self.reward)

    @property
    def num_trainable(self) -> int:
        """Number of trainable tokens."""
        return int(np.count_nonzero(self.trainable))

    def observe(self, tokens: Sequence[int]) -> Sample:
        """Return this sample with environment tokens appended: seen by the model, not trained on."""
        count = len(tokens)
        return replace(
            self,
            tokens=np.concatenate([self.tokens, np.asarray(tokens, np.int32)]),
            trainable=np.concatenate([self.trainable, np.zeros(count, np.bool_)]),
            log_probs=np.concatenate([self.log_probs, np.full(count, np.nan, np.float32)]),
            versions=np.concatenate([self.versions, np.full(count, -1, np.int32)]),
        )

    def then(self, turn: Sample) -> Sample:
        """Return `turn`, which was generated from this sample's tokens, with this sample's earlier turns kept.

        Raises ValueError if `turn` does not begin with this sample's tokens.
        """
        count = len(self)
        if not np.array_equal(turn.tokens[:count], self.tokens):
            raise ValueError("a later turn must begin with the earlier ones' tokens; pass `sample.tokens` to generate")
        return replace(
            turn,
            trainable=np.concatenate([self.trainable, turn.trainable[count:]]),
            log_probs=np.concatenate([self.log_probs, turn.log_probs[count:]]),
            versions=np.concatenate([self.versions, turn.versions[count:]]),
            text=self.text + turn.text,
        )
