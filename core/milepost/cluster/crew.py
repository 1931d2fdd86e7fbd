"""The processes of a run on Ray, and waiting for them: a dead or stuck one ends the wait with a full account.

Every process has one call that never returns (`stay`). Whoever waits for anything waits for that too, so a death is
noticed at once, whichever process it is. A process that can be replaced is missed only by who waits for it.
"""

from __future__ import annotations

import asyncio
import os
import platform
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError

from milepost.cluster.failures import Failure, Outcome, WorkerError, WorkerLostError
from milepost.cluster.host import Host, Identity, Report
from milepost.cluster.logs import log_folder, shown_tail
from milepost.cluster.messages import Setup
from milepost.errors import MilepostError

START_SECONDS = 600.0
"""How long processes may take to come up, where that is more than the stall timeout."""
REPORT_SECONDS = 5.0
"""How long processes may take to say what they are doing."""
GRACE_SECONDS = 3.0
"""How long after one process failed another's death is still taken for the cause: a dead rank makes others fail."""
DUMP_SECONDS = 0.5
"""How long a process takes to write its stacks; the signal handler has no way to say that it is done."""
HOST_RUN = "_host.py"
"""File name in the stack of a thread that computes: those that wait or report stand in `host.py`."""
GROUPS = {"stay": 1, "report": 1}
"""Threads beside the one that computes."""

Call = tuple["Member", Any]
"""A process and the reference of a call to it."""


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One process of the run."""

    name: str
    handle: Any
    """The Ray actor."""
    death: Any
    """Reference that is ready when the process died."""
    log: Path
    start: Callable[[], Member]
    """Starts another one like it."""
    replaceable: bool = False
    """Whether the run outlives it."""

    def call(self, method: str, *args: Any) -> Call:
        """Begin a call."""
        return self, getattr(self.handle, method).remote(*args)


class MemberLostError(WorkerLostError):
    """A process that can be replaced died."""

    def __init__(self, message: str, member: Member) -> None:
        super().__init__(message)
        self.member = member


class Crew:
    """All processes of the run.

    Args:
        run_dir: where their logs are.
        stall_timeout: seconds that a call may take.
    """

    def __init__(self, run_dir: Path, stall_timeout: float) -> None:
        self._run_dir = run_dir
        self._stall_timeout = stall_timeout
        self._members: list[Member] = []
        self._identities: dict[str, Identity] = {}
        self._deaths: dict[Member, asyncio.Future[Any]] = {}

    @property
    def stall_timeout(self) -> float:
        """Seconds that a call may take unless it is given another limit."""
        return self._stall_timeout

    def add(
        self,
        host: type[Host],
        name: str,
        threads: int,
        options: Mapping[str, Any],
        *,
        replaceable: bool = False,
    ) -> Member:
        """Start a process that hosts `host`, where the Ray `options` say."""

        def start() -> Member:
            actor = ray.remote(concurrency_groups=GROUPS)(host).options(max_restarts=0, **options)
            handle = actor.remote(Setup(name, self._run_dir, threads))
            death = handle.stay.options(concurrency_group="stay").remote()
            return Member(name, handle, death, log_folder(self._run_dir) / f"{name}.log", start, replaceable)

        member = start()
        self._members.append(member)
        return member

    def replace(self, member: Member) -> Member:
        """Start a process in the place of one that died; it is not up yet (`identify`)."""
        ray.kill(member.handle, no_restart=True)  # of one that died in part
        new = member.start()
        self._members[self._members.index(member)] = new
        self._deaths.pop(member, None)
        self._identities.pop(member.name, None)
        return new

    def dead(self, members: Sequence[Member], wait: float = 0.0) -> list[Member]:
        """Return those of the processes that died, waiting so many seconds for a first one."""
        found, _ = ray.wait([member.death for member in members], num_returns=1, timeout=wait)
        if found:
            found, _ = ray.wait([member.death for member in members], num_returns=len(members), timeout=0)
        return [member for member in members if member.death in found]

    def identify(self, members: Sequence[Member] | None = None) -> None:
        """Wait until these processes (default all) are up, and learn which they are."""
        members = list(self._members if members is None else members)
        calls = [member.call("identity") for member in members]
        identities = self.gather(calls, "start", timeout=max(START_SECONDS, self._stall_timeout))
        self._identities |= {m.name: found for m, found in zip(members, identities, strict=True)}

    def node(self, member: Member) -> str:
        """Return the name of the node that a process is on."""
        return self._identities[member.name].node

    def gather(self, calls: Sequence[Call], phase: str, timeout: float | None = None) -> list[Any]:
        """Return what the calls return, in order; `phase` names what they do.

        Raises WorkerLostError if any process of the run died or a call is not done within the stall timeout (or
        `timeout`), the error of a call that failed with one of milepost's own, and WorkerError for any other. The first
        failure ends the wait: other ranks may be waiting for the one that failed. The death of a replaceable process is
        a MemberLostError where it is called, and nothing otherwise.
        """
        limit = self._stall_timeout if timeout is None else timeout
        begun = time.monotonic()
        pending = {ref: member for member, ref in calls}
        deaths = {member.death: member for member in self._watched(calls)}
        found: dict[Any, Any] = {}
        while pending:
            left = limit - (time.monotonic() - begun)
            if left <= 0:
                raise self._stalled(list(pending.values()), phase)
            # In short turns, so that signals are handled.
            ready, _ = ray.wait([*pending, *deaths], num_returns=1, timeout=min(left, 1.0))
            for ref in ready:
                if ref in deaths:
                    raise self._died(deaths[ref], phase)
                found[ref] = self._value(pending.pop(ref), ref, phase)
        return [found[ref] for _, ref in calls]

    async def gather_async(self, calls: Sequence[Call], phase: str, timeout: float | None = None) -> list[Any]:
        """Return what the calls return, as `gather` does, without blocking the event loop."""
        limit = self._stall_timeout if timeout is None else timeout
        begun = time.monotonic()
        futures = {_future(ref): (member, ref) for member, ref in calls}
        deaths = self._watched_deaths(calls)
        pending = set(futures)
        found: dict[Any, Any] = {}
        while pending:
            left = limit - (time.monotonic() - begun)
            if left <= 0:
                raise self._stalled([futures[future][0] for future in pending], phase)
            waited = {*pending, *deaths}
            done, _ = await asyncio.wait(waited, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            for future in done & deaths.keys():
                raise self._died(deaths[future], phase)
            for future in done:
                member, ref = futures[future]
                found[ref] = self._value(member, ref, phase)
        return [found[ref] for _, ref in calls]

    def _watched(self, calls: Sequence[Call]) -> list[Member]:
        """Return the processes without which these calls come to nothing."""
        called = {member for member, _ in calls}
        return [member for member in self._members if not member.replaceable or member in called]

    def _watched_deaths(self, calls: Sequence[Call]) -> dict[asyncio.Future[Any], Member]:
        found = {}
        for member in self._watched(calls):
            if member not in self._deaths:
                self._deaths[member] = _future(member.death)
            found[self._deaths[member]] = member
        return found

    def _value(self, member: Member, ref: Any, phase: str) -> Any:
        """Return what a finished call returned, or raise what it failed with."""
        try:
            outcome: Outcome = ray.get(ref)
        except RayActorError:
            raise self._died(member, phase) from None
        failure = outcome.failure
        if failure is None:
            return outcome.value
        if not failure.is_ours:
            dead = self.dead(self._watched([(member, ref)]), GRACE_SECONDS)
            if dead:
                raise self._died(dead[0], phase)
        raise self.error(member, failure)

    def error(self, member: Member, failure: Failure) -> MilepostError:
        """Return the error that says what failed in a process, with the end of its log where it was not foreseen."""
        error = failure.error(member.name)
        return WorkerError(f"{error}\n{shown_tail(member.log)}") if isinstance(error, WorkerError) else error

    def _died(self, member: Member, phase: str) -> MilepostError:
        identity = self._identities.get(member.name)
        which = f" (process {identity.pid})" if identity is not None else ""
        head = f"{member.name}{which} died in phase {phase!r}{self._cause(member)}"
        if member.replaceable:
            return MemberLostError(f"{head}\n{shown_tail(member.log)}", member)
        return WorkerLostError("\n".join([head, *self._account(dead=member), shown_tail(member.log)]))

    def stalled(self, member: Member, phase: str) -> MilepostError:
        """Return the error that says that a process got nowhere in `phase` within the time limit."""
        return self._stalled([member], phase)

    def _stalled(self, members: Sequence[Member], phase: str) -> MilepostError:
        names = ", ".join(member.name for member in members)
        head = f"{names} did not leave phase {phase!r} within cluster.stall_timeout ({self._stall_timeout:g} s)"
        account = self._account()
        return WorkerLostError("\n".join([head, *account, *(shown_tail(member.log) for member in members)]))

    def _cause(self, member: Member) -> str:
        try:
            ray.get(member.death)
        except RayActorError as error:
            detail = str(error).partition("Worker exit detail: ")[2].splitlines()
            return f": {detail[0].partition('. Some common causes')[0]}" if detail else ""
        return ""

    def _account(self, dead: Member | None = None) -> list[str]:
        """Say of every process what it is doing, and where in the code."""
        asked = {m.handle.report.options(concurrency_group="report").remote(): m for m in self._members if m != dead}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=REPORT_SECONDS) if asked else ([], [])
        reports: dict[str, Report | None] = {}
        for ref in ready:
            try:
                reports[asked[ref].name] = ray.get(ref)
            except RayActorError:
                reports[asked[ref].name] = None
        lines = []
        for member in self._members:
            if member == dead or (member.name in reports and reports[member.name] is None):
                lines.append(f"{member.name}: dead")
            elif (report := reports.get(member.name)) is None:
                lines += [f"{member.name}: does not answer", *(f"  {line}" for line in self._dump(member))]
            else:
                lines.append(f"{member.name}: {report.phase} for {report.seconds:.1f} s")
                lines += [f"  {line}" for line in report.stack.splitlines()]
        return lines

    def _dump(self, member: Member) -> list[str]:
        """Let a process that does not answer write its stacks to its log, by a signal that needs no interpreter.

        Returns the stack of the thread that computes.
        """
        identity = self._identities.get(member.name)
        if identity is None or identity.node != platform.node():
            return []
        before = member.log.stat().st_size
        os.kill(identity.pid, signal.SIGUSR1)
        time.sleep(DUMP_SECONDS)
        with member.log.open("rb") as log:
            log.seek(before)
            threads = log.read().decode(errors="replace").split("\n\n")
        return [line for thread in threads if HOST_RUN in thread for line in thread.splitlines()]

    def close(self) -> None:
        """End all processes, whatever they are doing."""
        for member in self._members:
            ray.kill(member.handle, no_restart=True)
        self._members.clear()


def _future(ref: Any) -> asyncio.Future[Any]:
    """Return a future of a call, whose failure is looked at elsewhere."""
    future: asyncio.Future[Any] = asyncio.wrap_future(ref.future())
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future
