"""A run as a job of a Ray cluster that is up already: what is packed and sent, and following it to its end.

Run configs and the modules beside them travel. Everything else a run reads and writes (model, data, run folder) is
named by absolute path, and is expected at that path on every node: a shared file system, seen here as it is there.
Importing this imports no Ray.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from milepost.config.files import model_paths, resolve_path
from milepost.config.loading import Loaded
from milepost.config.sources import relocated
from milepost.errors import ClusterError

T = TypeVar("T")

MAX_BYTES = 500 * 2**20
"""What Ray takes as the working folder of a job."""
POLL_SECONDS = 0.5
AGENT_SECONDS = 30.0
"""How long a cluster that says it has no agent for jobs yet is asked again."""
_NO_AGENT = "No available agent"
"""What Ray's head says before the agent of its node is up."""
_JOB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_CLIENT_PARTS = ("ray", "requests", "aiohttp")
"""What `ray[default]` installs for sending jobs."""
_OVERRIDES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
"""Ray prefers these to the address that its client is given."""
_CHATTY = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", "ray._private.runtime_env.packaging")
"""Ray's loggers that tell of every upload and closed connection."""


@dataclass(frozen=True, slots=True)
class Packed:
    """What a job starts from: a folder that holds it, and how it is named there."""

    configs: tuple[str, ...]
    """The run configs, relative to the folder, in the order they are composed."""
    modules: tuple[str, ...]
    """Modules (`score.py`) and packages (`rewards/`) beside the last run config."""


def pack(files: Sequence[Path], folder: Path) -> Packed:
    """Copy run configs, and the Python modules beside the last one, into an empty folder.

    Modules are the `*.py` files there and the folders with an `__init__.py`, whole except for hidden files and
    bytecode; they are copied because a reward or generate function may import what lies beside it. Run folders,
    checkpoints and data are none of these, and stay. Links are followed.

    Raises ClusterError if that is more than Ray takes (`MAX_BYTES`), naming the largest.
    """
    base = files[-1].absolute().parent
    ignore = shutil.ignore_patterns(".*", "__pycache__", "*.pyc")
    found = [
        path
        for path in sorted(base.iterdir())
        if not path.name.startswith(".") and (path.suffix == ".py" or (path / "__init__.py").is_file())
    ]
    sizes = {path.name: _size(path) for path in found}
    if sum(sizes.values()) > MAX_BYTES:
        name = max(sizes, key=lambda each: sizes[each])
        raise ClusterError(
            f"the modules beside {files[-1]} are {_mib(sum(sizes.values()))}, the largest {name} with "
            f"{_mib(sizes[name])}; Ray takes {_mib(MAX_BYTES)} with a job. Move data out of the packages"
        )
    for path in found:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=ignore)
        else:
            shutil.copyfile(path, folder / path.name)
    # The last keeps its name, which is the run's, and its place beside the modules; others of the same name go below.
    names = [files[-1].name]
    for index, file in reversed(list(enumerate(files[:-1]))):
        names.insert(0, file.name if file.name not in names else f"config-{index}/{file.name}")
    for name, file in zip(names, files, strict=True):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / name)
    return Packed(tuple(names), tuple(f"{path.name}/" if path.is_dir() else path.name for path in found))


def _size(path: Path) -> int:
    """Bytes of what is packed of a file or package."""
    if not path.is_dir():
        return path.stat().st_size
    inside = (file for file in path.rglob("*") if file.is_file())
    return sum(file.stat().st_size for file in inside if not _left_out(file.relative_to(path)))


def _left_out(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts) or path.suffix == ".pyc"


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def absolute_paths(loaded: Loaded) -> dict[str, Any]:
    """Return the model and data paths that do not stand for themselves elsewhere: dotted path to the absolute value.

    These are relative ones and those that begin with `~`. Names on the Hub stay names, which the cluster's own cache is
    to hold.
    """

    def move(place: str) -> str:
        here = resolve_path(place, loaded.base_dir)
        return str(here) if here.exists() else place

    config = loaded.config
    changed: dict[str, Any] = {path: move(text) for path, text in model_paths(config) if move(text) != text}
    places = [("data.path", config.data.path)]
    places += [(f"eval.datasets.{index}.path", each.path) for index, each in enumerate(config.eval.datasets)]
    for path, value in places:
        if (moved := relocated(value, move)) != value:
            changed[path] = _plain(moved)
    return changed


def _plain(value: Any) -> Any:
    """Return sources as they stand in a run config."""
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def entrypoint(
    python: str, configs: Sequence[str], sets: Sequence[str], moved: Mapping[str, Any], flags: Sequence[str]
) -> str:
    """Return the shell command of the job: `milepost train` on the packed run configs, as it was asked for here."""
    words = [python, "-m", "milepost", "train", *configs]
    for text in (*sets, *(f"{path}={json.dumps(value)}" for path, value in moved.items())):
        words += ["--set", text]
    return shlex.join([*words, *flags])


@contextmanager
def packed(files: Sequence[Path]) -> Iterator[tuple[Path, Packed]]:
    """Pack into a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="milepost-submit-") as name:
        yield Path(name), pack(files, Path(name))


@dataclass(frozen=True, slots=True)
class Ended:
    """How a job ended."""

    status: str
    """SUCCEEDED, FAILED or STOPPED, as Ray has it."""
    exit_code: int
    """The job's own, where it had one; 1 where it was stopped, killed or could not be started."""
    message: str
    """What Ray says about it."""


class JobClient:
    """The jobs of one Ray cluster, over HTTP.

    RAY_AUTH_MODE and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) are taken from the environment by Ray; the token goes into
    a header and nowhere else.

    Args:
        address: of the dashboard, `http://HEAD:8265`.

    Raises ClusterError if the client's packages are not installed, or nothing answers there, or it wants a token.
    """

    def __init__(self, address: str) -> None:
        self.address = _checked(address)
        absent = [part for part in _CLIENT_PARTS if find_spec(part) is None]
        if absent:
            raise ClusterError(f"submit needs {' and '.join(absent)}, not installed here; pip install 'ray[default]'")
        from ray.job_submission import JobSubmissionClient

        for logger in _CHATTY:
            logging.getLogger(logger).setLevel(logging.WARNING)
        hidden = {name: os.environ.pop(name) for name in _OVERRIDES if name in os.environ}
        try:
            self._client = self._asked(lambda: JobSubmissionClient(self.address))
        finally:
            os.environ.update(hidden)

    def submit(self, command: str, folder: Path, name: str | None = None, num_cpus: float = 0) -> str:
        """Upload a folder and start a shell command in it, on the cluster; return the job's name.

        A cluster that has just been started takes no jobs before its agent is up; it is asked again for
        `AGENT_SECONDS`. Raises ClusterError if the name is in use, or the cluster refuses the job.
        """
        if name is not None:
            if not _JOB_NAME.fullmatch(name):
                raise ClusterError(f"{name!r} is no name of a job; expected letters, digits, `.`, `_` and `-`")
            if any(name in (job.submission_id, job.job_id) for job in self._asked(self._client.list_jobs)):
                raise ClusterError(f"the cluster has a job {name!r} already; choose another --submission-id")

        def send() -> str:
            deadline = time.monotonic() + AGENT_SECONDS
            while True:
                try:
                    submitted: str = self._client.submit_job(
                        entrypoint=command,
                        submission_id=name,
                        runtime_env={"working_dir": str(folder)},
                        entrypoint_num_cpus=num_cpus or None,
                    )
                except RuntimeError as error:
                    if _NO_AGENT not in str(error):
                        raise
                    if time.monotonic() > deadline:
                        raise ClusterError(
                            f"the Ray cluster at {self.address} has no agent that takes jobs; if another cluster on "
                            "its machine holds the agent's port, start it with --dashboard-agent-listen-port=PORT"
                        ) from error
                    time.sleep(POLL_SECONDS)
                else:
                    return submitted

        return self._asked(send)

    def follow(self, job: str, show: Callable[[str], None]) -> Ended:
        """Show the job's log as it is written, and return how the job ended.

        Raises ClusterError if the cluster is lost; the job may then go on.
        """

        async def tail() -> None:
            async for text in self._client.tail_job_logs(job):
                show(text)

        self._asked(lambda: asyncio.run(tail()), job)
        while not (info := self._asked(lambda: self._client.get_job_info(job), job)).status.is_terminal():
            time.sleep(POLL_SECONDS)  # the log ends a moment before the job does
        code = info.driver_exit_code
        failed = code if code is not None and code > 0 else 1
        succeeded = info.status.value == "SUCCEEDED"
        return Ended(info.status.value, 0 if succeeded else failed, str(info.message or ""))

    def hint(self, job: str) -> str:
        """Say how to follow a job and how to stop it."""
        where = f"--address {shlex.quote(self.address)}"
        return f"follow it with: ray job logs {where} --follow {job}\nstop it with: ray job stop {where} {job}"

    def _asked(self, ask: Callable[[], T], job: str | None = None) -> T:
        """Return what the cluster answers; what goes wrong on the way is one ClusterError."""
        import aiohttp
        import requests
        from ray.exceptions import AuthenticationError

        after = f"; the job {job} may go on\n{self.hint(job)}" if job is not None else ""
        try:
            return ask()
        except AuthenticationError as error:
            raise ClusterError(
                f"the Ray cluster at {self.address} asks for a token, and {_token_state()}; set RAY_AUTH_MODE=token "
                "and RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH) as on the cluster's head"
            ) from error
        except (ConnectionError, requests.RequestException, aiohttp.ClientError) as error:
            what = "was lost" if job is not None else "does not answer"
            reason = f" ({_first_line(error)})" if not isinstance(error, ConnectionError) else ""
            expected = "expected the dashboard of a head started with `ray start --head --dashboard-host=0.0.0.0`"
            raise ClusterError(f"the Ray cluster at {self.address} {what}{reason}{after or f'; {expected}'}") from error
        except RuntimeError as error:
            # Ray's own for every other answer: the status, and perhaps a traceback of the head.
            raise ClusterError(f"the Ray cluster at {self.address} refused: {_last_line(error)}{after}") from error


def _checked(address: str) -> str:
    if re.fullmatch(r"https?://[^\s/]+(/\S*)?", address):
        return address.rstrip("/")
    raise ClusterError(
        f"{address!r} was given as address; expected that of the cluster's dashboard, as in --address http://HEAD:8265 "
        "(RAY_ADDRESS, the default, may also name the port that processes join at, which takes no jobs)"
    )


def _token_state() -> str:
    given = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return "the one that is set is not it" if given else "none is set"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1].rstrip(". ")
