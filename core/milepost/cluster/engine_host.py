"""One engine in a process of its own, and the calls by which the controller uses it.

Requests come in bunches and answers leave as they are ready, so that the number of calls does not grow with the number
of samples, and equal bunches give equal bits.
"""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import ray.util
import torch
from numpy.typing import NDArray

from milepost.cluster.building import build_engine, prepare_process
from milepost.cluster.failures import Failure, Outcome
from milepost.cluster.host import IDLE, Host
from milepost.cluster.messages import PlanMessage, Setup
from milepost.rollout.engine import Engine, MemoryTag, SamplingParams
from milepost.samples import Sample, Status, Task
from milepost.tokenizer import load_tokenizer
from milepost.weights.sockets import TargetServer, socket_endpoint
from milepost.weights.transport import EngineInfo

COLLECT_SECONDS = 1.0
"""How long `collect` waits for an answer before it returns none."""
GENERATE = "generate"


@dataclass(frozen=True, slots=True)
class Request:
    """One request; the task itself stays with the controller."""

    number: int
    tokens: NDArray[np.int32]
    params: SamplingParams
    key: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request: a sample's fields, or a failure."""

    number: int
    tokens: NDArray[np.int32] | None = None
    trainable: NDArray[np.bool_] | None = None
    log_probs: NDArray[np.float32] | None = None
    versions: NDArray[np.int32] | None = None
    status: Status = Status.COMPLETED
    text: str = ""
    failure: Failure | None = None

    def sample(self, task: Task) -> Sample:
        """Return the sample, for the task it was asked of."""
        # Arrays come in read-only memory of the object store; a sample's may be written.
        return Sample(
            task=task,
            tokens=np.array(self.tokens),
            trainable=np.array(self.trainable),
            log_probs=np.array(self.log_probs),
            versions=np.array(self.versions),
            status=self.status,
            text=self.text,
        )


class EngineHost(Host):
    """Runs one engine; every call but those of `Host` runs in one event loop."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._engine: Engine
        self._server: TargetServer
        self._running: dict[int, asyncio.Task[None]] = {}
        self._answers: list[Answer] = []
        self._some = asyncio.Event()

    async def build(self, message: PlanMessage, index: int) -> Outcome:
        """Build and start the engine; returns its `EngineInfo`."""

        async def build() -> EngineInfo:
            plan = message.restore(self.setup.name)
            device, dtype = prepare_process(plan, self.setup.threads)
            tokenizer = load_tokenizer(plan.model_path, plan.config.model.trust_remote_code)
            engine = build_engine(plan, tokenizer, device, dtype, name=str(index))
            await engine.start()
            self._engine = engine
            loop = asyncio.get_running_loop()

            def submit(function: Callable[[], None]) -> Future[None]:
                async def call() -> None:
                    with self.phase("take weights"):
                        function()

                return asyncio.run_coroutine_threadsafe(call(), loop)

            # Apart from the trainer's devices, an engine may also be on another node than the ranks.
            host = None if plan.colocated else ray.util.get_node_ip_address()
            self._server = TargetServer(engine, submit, host=host, device=device)
            endpoint = self._server.endpoint or socket_endpoint(platform.node(), self._server.path)
            return EngineInfo(index, endpoint, (_device_name(device),), node=platform.node())

        return await self._run("build engine", build())

    async def _run(self, phase: str, work: Awaitable[Any]) -> Outcome:
        with self.phase(phase):
            try:
                return Outcome(await work)
            except Exception as error:  # noqa: BLE001  the controller raises it again
                return self.failed(phase, error)

    async def submit(self, requests: Sequence[Request]) -> Outcome:
        """Begin to generate; the answers come from `collect`. All requests are with the engine before it goes on."""
        if not self._running:
            self.enter(GENERATE)
        for request in requests:
            self._running[request.number] = asyncio.ensure_future(self._generate(request))
        return Outcome()

    async def _generate(self, request: Request) -> None:
        task = Task(-1, "", ())
        try:
            sample = await self._engine.generate(task, request.tokens.tolist(), request.params, request.key)
        except asyncio.CancelledError:
            self._running.pop(request.number, None)
            raise
        except Exception as error:  # noqa: BLE001  the controller raises it again
            failure = self.failed(GENERATE, error).failure
            self._finish(Answer(request.number, failure=failure))
        else:
            self._finish(
                Answer(
                    request.number,
                    sample.tokens,
                    sample.trainable,
                    sample.log_probs,
                    sample.versions,
                    sample.status,
                    sample.text,
                )
            )

    def _finish(self, answer: Answer) -> None:
        self._running.pop(answer.number, None)
        self._answers.append(answer)
        self._some.set()
        self.enter(GENERATE if self._running else IDLE)

    async def collect(self) -> Outcome:
        """Return the answers that are ready, at least one unless none comes for a moment."""
        if not self._answers:
            self._some.clear()
            try:
                await asyncio.wait_for(self._some.wait(), COLLECT_SECONDS)
            except TimeoutError:
                return Outcome([])
        taken, self._answers = self._answers, []
        return Outcome(taken)

    async def cancel(self, numbers: Sequence[int]) -> Outcome:
        """Forget requests whose callers went away."""
        for number in numbers:
            if number in self._running:
                self._running[number].cancel()
        return Outcome()

    async def version(self) -> Outcome:
        """Return the version of the weights being served."""
        return Outcome(self._engine.version)

    async def abort(self) -> Outcome:
        """End all running requests now."""
        return await self._run("abort", self._engine.abort())

    async def pause(self) -> Outcome:
        """Stop decoding."""
        return await self._run("pause", self._engine.pause())

    async def resume(self) -> Outcome:
        """Go on decoding."""
        return await self._run("resume", self._engine.resume())

    async def sleep(self, tags: Sequence[MemoryTag]) -> Outcome:
        """Release memory."""
        return await self._run("sleep", self._engine.sleep(tags))

    async def wake(self, tags: Sequence[MemoryTag]) -> Outcome:
        """Take memory back."""
        return await self._run("wake", self._engine.wake(tags))

    async def healthy(self) -> Outcome:
        """Whether the engine answers."""
        return Outcome(await self._engine.healthy())

    async def stop(self) -> Outcome:
        """Shut the engine down."""

        async def stop() -> None:
            self._server.close()
            await self._engine.stop()

        return await self._run("stop", stop())


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
