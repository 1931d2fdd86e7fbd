"""All trainer ranks as one `Trainer`: the controller's calls, fanned out."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from milepost.cluster.crew import Crew, Member
from milepost.cluster.memory import Memory
from milepost.cluster.messages import PlanMessage
from milepost.cluster.shares import FORWARD_COLUMNS, Delivery, Shares, local_schedule
from milepost.training.schedule import Schedule, StepSchedule
from milepost.training.trainer import Batch, Part, Role, StepResult, Want
from milepost.weights.transport import Address, PushReport, WeightSource, World


class TrainerGroup:
    """Implements `milepost.training.trainer.Trainer` over ranks in processes of their own.

    Each rank is sent its own samples alone, every column once. What the calls raise, beside what the ranks' trainer
    does: WorkerLostError if a process of the run died or a call took too long.
    """

    def __init__(self, crew: Crew, members: Sequence[Member]) -> None:
        self._crew = crew
        self._members = list(members)
        self._world = World(())
        self._shares = Shares(1, keep_results=True)
        self._turn = threading.Lock()
        """An engine may be refilled while the loop saves: all ranks are to get the calls in one order."""

    def build(self, message: PlanMessage, host: str, port: int) -> None:
        """Let all ranks meet at `host`:`port` and build their trainers."""
        calls = [member.call("build", message, rank, host, port) for rank, member in enumerate(self._members)]
        worlds: list[World] = self._crew.gather(calls, "build trainer")
        # A rank may know only itself.
        infos = [next(i for i in world.ranks if i.rank == rank) for rank, world in enumerate(worlds)]
        self._world = World(tuple(infos))
        data_parallel = 1 + max(info.data for info in infos)
        self._shares = Shares(data_parallel, keep_results=data_parallel == len(infos))

    @property
    def world(self) -> World:
        """The ranks, where they stand and their parallel coordinates."""
        return self._world

    @property
    def bytes_moved(self) -> int:
        """Bytes of columns that passed between the controller and the ranks so far."""
        return self._shares.bytes_moved

    def forward(self, role: Role, schedule: Schedule, batch: Batch, want: Collection[Want]) -> dict[str, Tensor]:
        """Run the role over the batch; see `milepost.training.trainer.Trainer`."""
        deliveries = self._shares.deliver(schedule.steps, batch, FORWARD_COLUMNS, want)
        schedules = [local_schedule(self._shares, schedule, rank) for rank in range(len(deliveries))]
        found = self._on_shares("forward", role, schedules, deliveries, tuple(want))
        computed = [
            [f for f, i in zip(found, self._world.ranks, strict=True) if i.data == r] for r in range(len(deliveries))
        ]
        return self._shares.merge(deliveries, computed)

    def step(self, role: Role, schedule: StepSchedule, batch: Batch) -> StepResult:
        """Take one optimizer step; see `milepost.training.trainer.Trainer`."""
        deliveries = self._shares.deliver([schedule], batch, tuple(batch.columns))
        schedules = [self._shares.local(schedule, rank) for rank in range(len(deliveries))]
        results: list[StepResult] = self._on_shares("step", role, schedules, deliveries)
        return results[0]

    def _on_shares(
        self, method: str, role: Role, schedules: Sequence[Any], deliveries: Sequence[Delivery], *more: Any
    ) -> list[Any]:
        """Call every rank with its data-parallel rank's schedule and delivery."""
        calls = [
            (member, (method, role, schedules[info.data], deliveries[info.data], *more))
            for member, info in zip(self._members, self._world.ranks, strict=True)
        ]
        with self._turn:
            return self._crew.gather([member.call(*call) for member, call in calls], f"{method} {role}")

    def _on_all(self, phase: str, method: str, *args: Any) -> list[Any]:
        with self._turn:
            return self._crew.gather([member.call(method, *args) for member in self._members], phase)

    def offload(self, role: Role, parts: Collection[Part]) -> None:
        """Move these parts of the role to host memory on all ranks."""
        self._on_all(f"offload {role}", "offload", role, tuple(parts))

    def onload(self, role: Role, parts: Collection[Part]) -> None:
        """Bring these parts of the role back to the device on all ranks."""
        self._on_all(f"onload {role}", "onload", role, tuple(parts))

    def memory(self) -> list[Memory]:
        """Read how much memory each rank's device has in use."""
        return self._on_all("measure memory", "memory")

    def source(self, role: Role) -> WeightSource:
        """Not here: weights are with the ranks, which push them. Raises NotImplementedError."""
        raise NotImplementedError(f"the {role}'s weights are in the processes of the ranks; use Compute.push")

    def save(self, folder: Path) -> None:
        """Write weights, optimizer, schedule and random state of all trained roles into an existing folder."""
        self._on_all("save", "save", folder)

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises CheckpointError if it does not fit this run."""
        self._on_all("load", "load", folder)

    def open_senders(self, address: Address) -> None:
        """Open the trainer's side of a transport on all ranks."""
        calls = [member.call("open_sender", address, rank) for rank, member in enumerate(self._members)]
        self._crew.gather(calls, "open transport")

    def push(self, version: int, engines: Collection[int] | None = None) -> PushReport:
        """Push the actor's weights from all ranks together; the report is of them all."""
        reports: list[PushReport] = self._on_all("push", "push", version, engines)
        return PushReport(
            version,
            sum(report.num_bytes for report in reports),
            max(report.seconds for report in reports),
            tuple(sorted({engine for report in reports for engine in report.engines})),
        )

    def close(self) -> None:
        """Release everything on all ranks."""
        self._on_all("close", "close")
