"""The program a reward worker runs: `python -m milepost.rollout.rewards.worker FD`.

FD is a socket to the controller. The first line that comes in says which reward to build; then come lines of calls,
and each call is answered by a line of its own as soon as it is done. Nothing here imports torch, so a worker is up in
the time numpy and the reward itself take.
"""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import inspect
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

from milepost.errors import MilepostError
from milepost.registry import Registry, resolve, use
from milepost.rollout.rewards.calls import Failure, Scope, call_reward, checked, failure_of, is_asynchronous, scope_of
from milepost.rollout.rewards.wire import Answer, decode_calls, encode_answer, encode_line
from milepost.samples import Sample

PR_SET_PDEATHSIG = 1
LINE_LIMIT = 1 << 31
"""Bytes one line of calls may have."""


def main() -> None:
    """Serve the controller at the socket named on the command line until it hangs up."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(channel.fileno(), False)
    _die_with_controller()
    # Where a reward crashed or hangs is then in the worker's log: the controller sends SIGUSR1 before it kills.
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    lines = channel.makefile("rb")
    setup = json.loads(lines.readline())
    try:
        _limit_memory(setup["memory_bytes"])
        reward = build_reward(setup)
        scope, asynchronous = scope_of(reward), is_asynchronous(reward)
    except BaseException as error:
        known = isinstance(error, MilepostError)
        channel.sendall(encode_line({"failed": str(error) if known else "".join(traceback.format_exception(error))}))
        raise
    channel.sendall(encode_line({"ready": {"scope": scope, "asynchronous": asynchronous}}))
    if asynchronous:
        lines.detach()
        asyncio.run(_serve_overlapping(channel, reward, scope, setup["timeout"]))
    else:
        _serve_in_order(channel, lines, reward, scope)


def build_reward(setup: dict[str, Any]) -> Any:
    """Build the reward that `setup` names (name, options, block, modules, base_dir).

    `base_dir` comes first on the module path, so that code lying beside the run config is found.
    """
    sys.path.insert(0, setup["base_dir"])
    use(Registry.load(block=setup["block"], modules=setup["modules"], base_dir=setup["base_dir"]))
    return resolve("reward", setup["name"], setup["options"])


def _serve_in_order(channel: socket.socket, lines: Any, reward: Any, scope: Scope) -> None:
    pid = os.getpid()
    while line := lines.readline():
        for number, samples in decode_calls(json.loads(line)):
            began = time.perf_counter()
            answer = _answer(reward, scope, samples)
            _leave_if_forked(pid)
            channel.sendall(encode_answer(number, answer, time.perf_counter() - began))


def _answer(reward: Any, scope: Scope, samples: Sequence[Sample]) -> Answer:
    try:
        answer = call_reward(reward, scope, samples)
        if inspect.isawaitable(answer):
            answer = asyncio.run(_wait(answer))
        return checked(scope, answer, len(samples))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a reward raises costs this score and no more
        return failure_of(error)


async def _wait(answer: Any) -> Any:
    return await answer


async def _serve_overlapping(channel: socket.socket, reward: Any, scope: Scope, timeout: float) -> None:
    pid = os.getpid()
    reader, writer = await asyncio.open_connection(sock=channel, limit=LINE_LIMIT)
    running: set[asyncio.Task[None]] = set()

    async def answer_call(number: int, samples: Sequence[Sample]) -> None:
        began = time.perf_counter()
        answer: Answer
        limit = asyncio.timeout(timeout)
        try:
            async with limit:
                answer = checked(scope, await call_reward(reward, scope, samples), len(samples))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a reward raises costs this score and no more
            answer = failure_of(error)
            if limit.expired():
                answer = Failure("timeout", f"no score within {timeout:g} s; where it was then:\n{answer.detail}")
        seconds = time.perf_counter() - began
        _leave_if_forked(pid)
        writer.write(encode_answer(number, answer, seconds))

    while line := await reader.readline():
        for number, samples in decode_calls(json.loads(line)):
            task = asyncio.create_task(answer_call(number, samples))
            running.add(task)
            task.add_done_callback(running.discard)


def _leave_if_forked(pid: int) -> None:
    """End a process that a reward forked and let return: only the worker itself may answer."""
    if os.getpid() != pid:
        os._exit(1)


def _die_with_controller() -> None:
    """Ask Linux to kill this process when the controller dies, even in the middle of a call that never returns."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_memory(limit: int | None) -> None:
    # Other systems refuse or ignore an address-space limit.
    if limit is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
