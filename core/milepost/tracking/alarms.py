"""Alarms: what the metrics of a run say when something is wrong that no exception shows.

Each check is a pure function of a few numbers. `Alarms` looks at a run's records one after the other, in any process:
the same records give the same alarms, whether they come from the run itself, from a resume, or from `metrics.jsonl`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from milepost.tracking.records import LineFile, Record


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When an alarm is raised."""

    ratio: float = 1e-2
    """Largest |log ratio|, in nats, that numerics explain in the first step after a rollout."""
    entropy: float = 0.1
    """Share of its first value to which the entropy may fall while problems are unsolved."""
    solved: float = 0.8
    """Mean reward, between the lowest and the highest that a sample ever got, from which problems count as solved."""
    explained_variance: float = 0.02
    """Explained variance up to which the critic explains nothing."""
    patience: int = 10
    """Steps in a row with a low entropy, or rollouts in a row whose critic explains nothing, until it is an alarm."""
    baseline: int = 5
    """First steps whose mean entropy is the one compared with."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One alarm."""

    name: str
    """`ratio`, `entropy` or `critic`."""
    rollout: int
    message: str
    """What was seen, and what to look at."""

    def to_json(self) -> dict[str, Any]:
        """Return the alarm as plain data."""
        return asdict(self)


def ratio_alarm(difference: float, limit: float) -> str | None:
    """Say what is wrong if the first step after a rollout does not find the log-probs that the rollout was made with.

    `difference` is the largest |log-prob(new) - log-prob(old)| in nats, before any update.
    """
    if difference <= limit:
        return None
    return (
        f"the ratio is not 1 on policy: before any update, a token's log-prob differs by {difference:.3g} nats from "
        f"when the rollout was made (limit {limit:g}). The trainer's forward pass is not the same twice: look for "
        "dropout, other packing, or a kernel that is not deterministic"
    )


def entropy_alarm(entropy: float, baseline: float, limit: float) -> str | None:
    """Say what is wrong if the entropy, in nats per token, fell to a small share of what it was."""
    if baseline <= 0.0 or entropy > limit * baseline:
        return None
    return (
        f"the entropy collapsed: {entropy:.3g} nats per token, from {baseline:.3g} at the start, while problems are "
        "still unsolved. Samples of a prompt become all alike and nothing new is tried; try a lower optimizer.lr, a "
        "larger algorithm.eps_clip_high, or algorithm.entropy_coef above 0"
    )


def critic_alarm(explained_variance: float, limit: float) -> str | None:
    """Say what is wrong if the critic's values say no more of the returns than their mean."""
    if explained_variance > limit:
        return None
    return (
        f"the critic explains nothing: explained variance {explained_variance:.3g}, where 1 is perfect and 0 is no "
        "better than the mean return, so that advantages are no better than with a constant baseline. Try another "
        "critic.lr, critic.warmup_rollouts, or more trainer.steps_per_rollout"
    )


@dataclass(slots=True)
class Alarms:
    """Watches a run's records. An alarm is raised once, and again only after things had been well in between.

    Args:
        check_ratio: whether old log-probs are the trainer's own, so that the ratio must be 1 before the first step.
        thresholds: when to raise.
    """

    check_ratio: bool = True
    thresholds: Thresholds = field(default_factory=Thresholds)
    _raised: set[str] = field(default_factory=set)
    _bad: dict[str, int] = field(default_factory=dict)
    """Bad records in a row, by alarm."""
    _first_entropies: list[float] = field(default_factory=list)
    _rewards: tuple[float, float] = (math.inf, -math.inf)
    """Lowest and highest reward that a sample ever got."""
    _unsolved: bool = True
    _rollout: int = -1
    """Rollout of the last actor step seen."""
    _critic_rollout: int = -1
    """Rollout of the last critic step seen: the explained variance is the rollout's, the same for all its steps."""

    def look(self, record: Record) -> list[Alarm]:
        """Take one record in; return the alarms that it raises."""
        found: list[Alarm | None] = []
        if record.kind == "rollout":
            self._note_rewards(record.metrics)
        elif record.kind == "critic":
            first, self._critic_rollout = record.rollout != self._critic_rollout, record.rollout
            found = [self._look_at_critic(record)] if first else []
        elif record.kind == "step":
            first, self._rollout = record.rollout != self._rollout, record.rollout
            found = [self._look_at_ratio(record) if first and self.check_ratio else None, self._look_at_entropy(record)]
        return [alarm for alarm in found if alarm is not None]

    def _note_rewards(self, metrics: Mapping[str, float]) -> None:
        if not {"rollout/raw_reward", "rollout/reward_min", "rollout/reward_max"} <= metrics.keys():
            return
        low, high = self._rewards
        self._rewards = min(low, metrics["rollout/reward_min"]), max(high, metrics["rollout/reward_max"])
        low, high = self._rewards
        self._unsolved = metrics["rollout/raw_reward"] < low + self.thresholds.solved * (high - low)

    def _look_at_ratio(self, record: Record) -> Alarm | None:
        difference = record.metrics.get("train/old_log_prob_diff", 0.0)
        return self._raise("ratio", record, ratio_alarm(difference, self.thresholds.ratio), patience=1)

    def _look_at_entropy(self, record: Record) -> Alarm | None:
        entropy = record.metrics.get("train/entropy")
        if entropy is None:
            return None
        if len(self._first_entropies) < self.thresholds.baseline:
            self._first_entropies.append(entropy)
            return None
        baseline = sum(self._first_entropies) / len(self._first_entropies)
        message = entropy_alarm(entropy, baseline, self.thresholds.entropy) if self._unsolved else None
        return self._raise("entropy", record, message, patience=self.thresholds.patience)

    def _look_at_critic(self, record: Record) -> Alarm | None:
        explained = record.metrics.get("critic/explained_variance", math.nan)
        # Undefined where all returns are equal: that says nothing of the critic.
        if math.isnan(explained):
            return None
        message = critic_alarm(explained, self.thresholds.explained_variance)
        return self._raise("critic", record, message, patience=self.thresholds.patience)

    def _raise(self, name: str, record: Record, message: str | None, *, patience: int) -> Alarm | None:
        """Count a bad record; return an alarm once there were enough in a row, unless it was raised already."""
        if message is None:
            self._bad[name] = 0
            self._raised.discard(name)
            return None
        self._bad[name] = self._bad.get(name, 0) + 1
        if self._bad[name] < patience or name in self._raised:
            return None
        self._raised.add(name)
        return Alarm(name, record.rollout, message)


class AlarmSink:
    """Prints alarms and keeps them in RUN_DIR/alarms.jsonl, one object a line: name, rollout, message."""

    def __init__(self, run_dir: Path, *, check_ratio: bool, say: Callable[[str], None]) -> None:
        self._check_ratio = check_ratio
        self._say = say
        self._alarms = Alarms(check_ratio)
        self._file = LineFile(run_dir / "alarms.jsonl")

    def log(self, record: Record) -> None:
        """Look at the record; print and keep the alarms that it raises."""
        for alarm in self._look(record):
            self._say(f"alarm: rollout {alarm.rollout}: {alarm.message}")

    def rewind(self, records: Sequence[Record]) -> None:
        """Start over with these records; what they raise was printed before and is only kept."""
        self._alarms = Alarms(self._check_ratio)
        self._file.truncate(0)
        for record in records:
            self._look(record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _look(self, record: Record) -> list[Alarm]:
        found = self._alarms.look(record)
        for alarm in found:
            self._file.append(alarm.to_json())
        return found
