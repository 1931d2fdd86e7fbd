"""The Ray cluster of a run: the one that RAY_ADDRESS names, or one that is started on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import ray

from milepost.cluster.logs import log_folder, shown_tail
from milepost.errors import ConfigError, Problem, RunError

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
HEAD_LOG = "ray.log"
START_TRIES = 3
STOP_SECONDS = 30.0
"""How long a cluster that was started here may take to end before it is killed."""
_DASHBOARD_PARTS = ("aiohttp", "aiohttp_cors", "opencensus")
"""What `ray[default]` installs for the dashboard."""


@contextmanager
def ray_cluster(num_slots: int, run_dir: Path) -> Iterator[None]:
    """Join the cluster that RAY_ADDRESS names, or one that is started for this run, with one CPU for each slot.

    Raises ConfigError if there is no such cluster, or it does not let us in; RunError if none can be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    named = os.environ.get("RAY_ADDRESS")
    if named:
        with _joined(named, f"cluster at {named}"):
            yield
        return
    with _started(num_slots, run_dir) as address, _joined(address, "cluster started here"):
        yield


@contextmanager
def _joined(address: str, where: str) -> Iterator[None]:
    """Be connected with the cluster at an address, and say so."""
    # Ray puts a handler of its own in the place of the one that makes SIGTERM finish the step and save.
    previous = signal.getsignal(signal.SIGTERM)
    try:
        context = ray.init(address=address, **QUIET)
    except ConnectionError as error:
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        message = f"the Ray cluster at RAY_ADDRESS={address} cannot be joined: {reason}"
        raise ConfigError([Problem("cluster.launcher", f"{message} Unset RAY_ADDRESS to start one here")]) from error
    try:
        signal.signal(signal.SIGTERM, previous)
        url = context.dashboard_url
        shown = f"dashboard http://{url}" if url else "no dashboard (pip install 'ray[default]' for one)"
        click.echo(f"ray: {where}, {shown}", err=True)
        yield
    finally:
        ray.shutdown()


@contextmanager
def _started(num_slots: int, run_dir: Path) -> Iterator[str]:
    """Start a cluster on this machine, in a session of its own, and end it afterwards; gives its address.

    As many CPUs as there are slots, whatever the machine has: ranks beyond the cores take turns, and Ray starts an idle
    process for every CPU in advance. Ray gives itself half a minute, which a busy machine may need more than once.
    """
    # Ranks and engines are the run itself. Ray gives its workers a niceness of 15, and on a busy machine they then
    # hardly get a core.
    os.environ.setdefault("RAY_worker_niceness", "0")
    dashboard = all(find_spec(part) for part in _DASHBOARD_PARTS)
    settings = {**QUIET, "num_cpus": num_slots, "include_dashboard": dashboard}
    log = log_folder(run_dir) / HEAD_LOG
    log.parent.mkdir(parents=True, exist_ok=True)
    for _ in range(START_TRIES):
        with _head(settings, log) as address:
            if address is not None:
                yield address
                return
    raise RunError(f"no Ray cluster could be started here in {START_TRIES} tries\n{shown_tail(log)}")


@contextmanager
def _head(settings: Mapping[str, Any], log: Path) -> Iterator[str | None]:
    """Run `milepost.cluster.ray_head`; gives the cluster's address, or None if it did not come up."""
    with log.open("a") as errors:
        head = subprocess.Popen(
            [sys.executable, "-m", "milepost.cluster.ray_head", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert head.stdin is not None and head.stdout is not None, "both were asked for"
    try:
        line = head.stdout.readline()
        yield json.loads(line)["address"] if line else None
    finally:
        head.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            head.wait(STOP_SECONDS)
        if head.poll() != 0:
            with suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)  # itself, or what it has left behind
            head.wait()
        head.stdout.close()
