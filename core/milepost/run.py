"""A run: the parts that one training run works with, and the bookkeeping around the loop.

`loop.py` says what happens; this says where it is written down: metrics, counters, checkpoints, and what a resumed run
finds again.
"""

from __future__ import annotations

import fcntl
import json
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from milepost import registry
from milepost.assembly import Parts, assemble
from milepost.checkpoint import CheckpointStore, read_state, save_tensors, verify, write_state
from milepost.cluster.logs import controller_log
from milepost.cluster.memory import fullest
from milepost.cluster.phases import Phase, Phases
from milepost.config.plan import Plan
from milepost.errors import CheckpointError, ConfigError, Problem, RunError
from milepost.interrupt import Interrupt
from milepost.provenance import write_provenance
from milepost.rollout.generation import Rollout
from milepost.samples import Sample
from milepost.tracking import Tracker
from milepost.training.trainer import StepResult
from milepost.training.turn import Turn
from milepost.weights.transport import PushReport

T = TypeVar("T")
MEMORY = "perf/memory_"
"""Metric prefix of the memory behind each phase."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What came of a run."""

    run_dir: Path
    num_rollouts: int
    """Rollouts trained on, those before a resume included."""
    interrupted: bool
    evaluations: Mapping[str, tuple[float, float]]
    """Per held-out set: first and last accuracy."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """Per phase: most gigabytes in use on one device at the end of it, over the run."""

    def __str__(self) -> str:
        curves = [f"{name} accuracy {first:.3f} -> {last:.3f}" for name, (first, last) in self.evaluations.items()]
        state = (
            f"interrupted after {self.num_rollouts} rollouts" if self.interrupted else f"{self.num_rollouts} rollouts"
        )
        return "; ".join([*curves, state, f"run folder {self.run_dir}"])


@dataclass(slots=True)
class Progress:
    """What a resumed run finds again beside the trainer's own state; plain JSON data.

    It is taken at one moment, the end of a rollout's training. A save made later, by an interrupt, writes what was
    taken then: the prompts drawn and lines written since belong to work that a resumed run does again.
    """

    index: int = -1
    """The last rollout that was trained on."""
    data: dict[str, Any] = field(default_factory=dict)
    """Position in the training prompts."""
    written: dict[str, int] = field(default_factory=dict)
    """Sizes of the files that lines are appended to."""
    constant_rollouts: int = 0
    """Rollouts in a row in which every reward was the same."""
    skipped_steps: int = 0
    """Optimizer steps in a row that were not finite."""


class Run:
    """One training run at work; open it with `Run.open`."""

    def __init__(self, plan: Plan, parts: Parts, tracker: Tracker, interrupt: Interrupt) -> None:
        self.plan = plan
        self.parts = parts
        self.tracker = tracker
        self.phases = Phases(colocated=plan.colocated, on_end=self._measure_memory)
        self._memory: dict[Phase, float] = {}
        """Gigabytes in use at the end of each phase of this iteration."""
        self.store = CheckpointStore(plan.run_dir, keep=plan.config.checkpoint.keep)
        self.progress = Progress(data=parts.prompts.state_dict())
        self.saved_index: int | None = None
        self._interrupt = interrupt
        self._since = time.perf_counter()

        self.engine = parts.engine
        self.trainer = parts.trainer
        self.estimator = parts.estimator
        self.generator = parts.generator
        self.held_out = parts.held_out
        self.roles = parts.roles
        self.sample_cost = parts.sample_cost

    @classmethod
    @asynccontextmanager
    async def open(cls, plan: Plan, *, progress: bool) -> AsyncIterator[Run]:
        """Build the plan's parts, start the engine and the reward workers, and take the run folder for this process.

        Raises CheckpointError if another process has the folder, ConfigError if there can be no such folder.
        """
        _make_run_dir(plan)
        interrupt = Interrupt()
        with (
            _sole_owner(plan.run_dir),
            controller_log(plan.run_dir),
            interrupt.handling_signals(),
            Tracker(plan.run_dir, config=plan.config, progress=progress) as tracker,
        ):
            async with assemble(plan) as parts:
                yield cls(plan, parts, tracker, interrupt)

    # Interrupts

    @property
    def interrupted(self) -> bool:
        """Whether the user asked the run to stop."""
        return self._interrupt.requested

    async def until_interrupted(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `work`, or None if the user asks the run to stop first."""
        return await self._interrupt.race(work)

    # Checkpoints

    def restore(self) -> int:
        """Go on from the last checkpoint if there is one and the config allows it; return its rollout, or -1.

        Raises CheckpointError if there is none and there must be, or one and there must not be, or it does not fit.
        """
        resume = self.plan.config.checkpoint.resume
        latest = self.store.latest()
        if latest is None:
            if resume == "must":
                raise CheckpointError(
                    f"{self.plan.run_dir} has no complete checkpoint, and checkpoint.resume is must; "
                    "give the run folder of an earlier run, or use resume: auto"
                )
            self.tracker.truncate({})
            self._describe()
            return -1
        if resume == "never":
            raise CheckpointError(
                f"{self.plan.run_dir} has checkpoints, and checkpoint.resume is never; "
                "choose another run.dir or remove the folder, so that nothing is overwritten"
            )
        verify(latest)
        state = read_state(latest)
        self._compare_plugins(state["plugins"], latest)
        self.trainer.load(latest / "trainer")
        self.progress = Progress(**state["progress"])
        self.parts.prompts.load_state_dict(self.progress.data)
        self.saved_index = self.progress.index
        if self.is_finished(self.progress.index):
            self.tracker.say(f"already finished: all {self.plan.num_rollouts} rollouts are done")
            return self.progress.index
        self.tracker.truncate(self.progress.written)
        self._describe()
        self.tracker.say(f"resuming after rollout {self.progress.index} from {latest}")
        return self.progress.index

    def _compare_plugins(self, recorded: Mapping[str, str], checkpoint: Path) -> None:
        """Raise CheckpointError if a checkpoint was made with other plugins than are loaded; warn where allowed."""
        differences = registry.current().differences(recorded)
        if not differences:
            return
        listing = "\n".join(f"  {difference}" for difference in differences)
        message = f"{checkpoint} was made with other plugins (there) than are loaded now (here):\n{listing}"
        if not self.plan.config.checkpoint.allow_other_plugins:
            raise CheckpointError(
                f"{message}\nThe run would not go on as it began. Install what it was made with, or accept the "
                "difference with --set checkpoint.allow_other_plugins=true"
            )
        self.tracker.say(f"warning: {message}")

    def _describe(self) -> None:
        """Write down what the run folder's run is from now on: not before it is certain that this run may use it."""
        (self.plan.run_dir / "summary.json").unlink(missing_ok=True)  # of a shorter run that this one prolongs
        (self.plan.run_dir / "config.yaml").write_text(
            yaml.safe_dump(self.plan.config.model_dump(mode="json"), sort_keys=False), encoding="utf-8"
        )
        write_provenance(self.plan)

    def is_finished(self, index: int) -> bool:
        """Whether the run had already ended after rollout `index`, its last."""
        return index >= self.plan.num_rollouts - 1 and (self.plan.run_dir / "summary.json").is_file()

    def finished_training(self, index: int) -> None:
        """Note where everything stands, right after the optimizer steps of rollout `index`."""
        self.progress.index = index
        self.progress.data = self.parts.prompts.state_dict()
        self.progress.written = self.tracker.written()

    def save_is_due(self, index: int) -> bool:
        """Whether a checkpoint is to be made after rollout `index`."""
        settings = self.plan.config.checkpoint
        interval = settings.save_interval
        last = settings.save_last and index == self.plan.num_rollouts - 1
        return last or self.interrupted or (interval is not None and (index + 1) % interval == 0)

    def save(self) -> None:
        """Write a checkpoint of the last rollout that was trained on, unless there is one."""
        if self.progress.index < 0 or self.saved_index == self.progress.index:
            return
        with self.phases(Phase.SAVE), self.store.saving(self.progress.index) as folder:
            (folder / "trainer").mkdir()
            self.trainer.save(folder / "trainer")
            write_state(folder, {"progress": asdict(self.progress), "plugins": registry.current().distributions()})
        self.saved_index = self.progress.index

    # Weights

    def push(self, version: int) -> PushReport:
        """Carry the actor's weights to the engines as this version."""
        return self.parts.push(version)

    # What is watched

    def watch_rewards(self, rollout: Rollout) -> None:
        """Stop the run when rollout after rollout has one and the same reward everywhere, unless a teacher teaches.

        Raises RunError with the likely cause.
        """
        if self.plan.needs_teacher:
            return
        rewards = {sample.reward for sample in rollout.samples}
        self.progress.constant_rollouts = self.progress.constant_rollouts + 1 if len(rewards) == 1 else 0
        limit = self.plan.config.rollout.constant_reward_limit
        if self.progress.constant_rollouts >= limit:
            raise RunError(_constant_reward(self.plan, rewards.pop(), rollout, limit))

    def watch_steps(self, turn: Turn, index: int, results: Sequence[StepResult]) -> None:
        """Dump the batch of a step that was not finite, and stop the run after a few in a row.

        Raises RunError naming the dump.
        """
        for result in results:
            self.progress.skipped_steps = self.progress.skipped_steps + 1 if result.skipped else 0
            if not result.skipped:
                continue
            dump = self.plan.run_dir / f"nonfinite-rollout-{index:06d}.safetensors"
            save_tensors(dump, {"lengths": turn.batch.lengths, **turn.batch.columns}, {})
            self.tracker.say(f"warning: rollout {index}: loss or gradient not finite, step skipped; batch in {dump}")
            if self.progress.skipped_steps >= self.plan.config.trainer.nonfinite_limit:
                raise RunError(
                    f"{self.progress.skipped_steps} optimizer steps in a row were not finite; the last batch is in "
                    f"{dump}. A lower optimizer.lr or optimizer.clip_grad, or another reward scale, may help"
                )

    def _measure_memory(self, phase: Phase) -> None:
        """Note how much memory is in use behind a phase."""
        self._memory[phase] = fullest(self.parts.memory())

    # What is written down

    def log_rollout(self, index: int, rollout: Rollout, metrics: Mapping[str, float]) -> None:
        """Log one rollout's performance, metrics and some of its samples."""
        seconds = self.phases.seconds[Phase.GENERATE]
        num_tokens = sum(sample.num_trainable for sample in rollout.samples)
        rate = num_tokens / seconds / self.plan.world_size
        stats = self.parts.rewards.stats()
        self.tracker.log(
            "perf",
            index,
            {
                "perf/rollout_time": seconds,
                "perf/tokens_per_gpu_per_second": rate,
                "perf/reward_time": stats.seconds,
            },
        )
        rewards = {"reward_failures": float(stats.failures), "reward_restarts": float(stats.restarts)}
        self.tracker.log("rollout", index, {f"rollout/{name}": value for name, value in {**metrics, **rewards}.items()})
        self.tracker.samples(index, rollout.samples)

    def log_steps(self, role: str, index: int, results: Sequence[StepResult], extra: Mapping[str, float]) -> None:
        """Log each optimizer step of a rollout."""
        kind, prefix = ("step", "train") if role == "actor" else (role, role)
        for i, result in enumerate(results):
            metrics = {**result.metrics, **extra, "skipped": float(result.skipped)}
            number = index * self.plan.steps_per_rollout + i
            self.tracker.log(
                kind, number, {f"{prefix}/{name}": value for name, value in metrics.items()}, rollout=index
            )

    def log_push(self, index: int, report: PushReport) -> None:
        """Log what the training half of an iteration and the push cost."""
        seconds = self.phases.take_seconds()
        named = {
            Phase.CRITIC: "critic_train_time",
            Phase.ACTOR: "actor_train_time",
            Phase.SAVE: "save_time",
            Phase.EVALUATE: "eval_time",
            Phase.SLEEP: "sleep_time",
            Phase.OFFLOAD: "offload_time",
            Phase.WAKE: "wake_time",
            Phase.PUSH: "push_time",
            Phase.SERVE: "serve_time",
        }
        metrics = {f"perf/{name}": seconds[phase] for phase, name in named.items() if phase in seconds}
        # What the trainer waited for: the engines' turn, and their falling asleep.
        waits = seconds.get(Phase.GENERATE, 0.0) + seconds.get(Phase.SLEEP, 0.0)
        handing = sum(seconds.get(phase, 0.0) for phase in (Phase.OFFLOAD, Phase.WAKE, Phase.PUSH, Phase.SERVE))
        metrics |= {
            "perf/train_wait_time": waits,
            "perf/update_weights_time": handing,
            "perf/update_weights_gb_per_second": report.num_bytes / max(report.seconds, 1e-9) / 1e9,
            "perf/iteration_time": time.perf_counter() - self._since,
        }
        self._since = time.perf_counter()
        memory, self._memory = self._memory, {}
        metrics |= {f"{MEMORY}{phase.value}": used for phase, used in memory.items()}
        if index >= 0:
            self.tracker.log("perf", index, metrics)

    def evaluation_is_due(self, index: int) -> bool:
        """Whether held-out sets are to be evaluated after rollout `index` (-1: before the first)."""
        settings = self.plan.config.eval
        if not self.held_out:
            return False
        if index == -1:
            return settings.before
        last = index == self.plan.num_rollouts - 1
        return last or (settings.interval is not None and (index + 1) % settings.interval == 0)

    def log_evaluation(self, index: int, name: str, metrics: Mapping[str, float], samples: Sequence[Sample]) -> None:
        """Log one evaluation; its index is the number of rollouts trained on so far."""
        self.tracker.log("eval", index + 1, {f"eval/{name}/{key}": value for key, value in metrics.items()})
        self.tracker.samples(index, samples, kind=f"eval/{name}")

    def summarise(self) -> RunSummary:
        """Return what came of the run; a finished one is marked so in its folder.

        One that was interrupted after its last optimizer step is not: its last evaluation may be missing.
        """
        evaluations: dict[str, tuple[float, float]] = {}
        for line in self.tracker.lines("eval"):
            for key, value in line.items():
                if key.startswith("eval/") and key.endswith("/accuracy"):
                    name = key.removeprefix("eval/").removesuffix("/accuracy")
                    evaluations[name] = (evaluations.get(name, (value, value))[0], value)
        memory: dict[str, float] = {}
        for line in self.tracker.lines("perf"):
            for key, value in line.items():
                if key.startswith(MEMORY):
                    phase = key.removeprefix(MEMORY)
                    memory[phase] = max(value, memory.get(phase, 0.0))
        done = self.progress.index + 1
        interrupted = self.interrupted or done < self.plan.num_rollouts
        summary = RunSummary(self.plan.run_dir, done, interrupted, evaluations, memory)
        if not summary.interrupted:
            text = json.dumps({"num_rollouts": done, "evaluations": evaluations, "memory_gb": memory}, indent=2)
            (self.plan.run_dir / "summary.json").write_text(text + "\n", encoding="utf-8")
        return summary


def _make_run_dir(plan: Plan) -> None:
    """Make the run folder if need be. Raises ConfigError if that is not possible."""
    try:
        plan.run_dir.mkdir(parents=True, exist_ok=True)
        (plan.run_dir / ".lock").touch()
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        reason = getattr(error, "strerror", None) or error
        message = f"nothing can be written into {plan.run_dir}: {reason}; choose another run.dir"
        raise ConfigError([Problem("run.dir", message, plan.origins.get("run.dir", ""))]) from error


@contextmanager
def _sole_owner(run_dir: Path) -> Iterator[None]:
    """Hold the run folder's lock; the system releases it however this process ends."""
    with (run_dir / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(
                f"another process is running in {run_dir}; wait for it, stop it, or choose another run.dir"
            ) from None
        yield


def _constant_reward(plan: Plan, reward: float, rollout: Rollout, limit: int) -> str:
    """Explain what probably makes every reward the same."""
    truncated = sum(sample.status.value == "truncated" for sample in rollout.samples) / len(rollout.samples)
    if truncated > 0.5:
        cause = (
            f"{truncated:.0%} of the responses reach rollout.max_response_len "
            f"({plan.config.rollout.max_response_len}) before they end; raise it"
        )
    elif reward > 0:
        cause = "the problems may be too easy, or the reward accepts anything"
    else:
        cause = (
            "the problems may be too hard, the label may not be where data.label says, or the reward may expect "
            "another form of answer"
        )
    example = rollout.samples[0]
    return (
        f"every reward was {reward:g} in {limit} rollouts in a row, so there is nothing to learn from: {cause}. "
        f"An example: label {example.task.label!r}, response {example.text[-200:]!r}"
    )
