"""One SGLang server as an engine: token ids in and out over HTTP, with the log-prob of every sampled token.

SGLang's log-probs are of softmax(logits / temperature) before top-p, top-k and min-p, which is what an engine promises
(`server.server_environment` pins the one variable that would change it). Greedy requests get those of the plain logits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import aiohttp
import numpy as np
from numpy.typing import NDArray

from milepost.errors import MilepostError, RunError
from milepost.rollout.engine import MemoryTag, SamplingParams
from milepost.rollout.local.sampling import check_params
from milepost.rollout.sglang.server import Server
from milepost.samples import Sample, Status, Task

TAGS: Final[Mapping[MemoryTag, str]] = {"weights": "weights", "kv_cache": "kv_cache", "graphs": "cuda_graph"}
"""Our names of parts of memory, and SGLang's."""

KEEP_ALIVE_SECONDS = 3.0
"""Idle connections are dropped before the server drops them (5 s), so that no request goes into a closing one."""

CONTROL_SECONDS = 300.0
"""How long a server may take over a call that is no generation."""

IDLE_SECONDS = 30.0
"""How long a server may take to come to rest behind its last request."""

ABORT_SECONDS = 0.2
"""How long to wait for running requests to end before they are told again."""

ENDINGS: Final[Mapping[str, Status]] = {
    "stop": Status.COMPLETED,
    "length": Status.TRUNCATED,
    "abort": Status.ABORTED,
}


class EngineLost(RunError):  # noqa: N818 it names what happened, as RunError does not
    """The server does not answer any more; its requests can run elsewhere."""


class SGLangEngine:
    """Implements `milepost.rollout.engine.Engine` with a server.

    A request's key becomes SGLang's `sampling_seed`. SGLang heeds it only with `enable_deterministic_inference: true`
    in `engine.options` (GPU backends alone); otherwise all requests draw from one stream of the server, seeded by
    `run.seed`, and a run cannot be repeated token by token.
    """

    def __init__(
        self,
        server: Server,
        *,
        decode: Callable[[list[int]], str],
        end_token_ids: Iterable[int],
        vocab_size: int,
        max_positions: int,
        index: int = 0,
        seeded: bool = False,
    ) -> None:
        """Make an engine that is fenced until weights were pushed.

        `decode` turns sampled token ids into text. A token id of `vocab_size` or more is refused, because it would end
        the server. `seeded` says that the server runs with deterministic inference.
        """
        self.server = server
        self.index = index
        self._decode = decode
        self._end_tokens = frozenset(end_token_ids)
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._seeded = seeded
        self._version = -1
        self._fenced = True
        self._asleep: set[MemoryTag] = set()
        self._pending = 0
        self._session: aiohttp.ClientSession | None = None
        self._epoch = 0
        """Number of aborts so far."""
        self._paused = False
        self._gate = asyncio.Event()
        self._gate.set()

    # State

    @property
    def version(self) -> int:
        """Version of the weights being served; -1 before the first push."""
        return self._version

    @property
    def endpoint(self) -> str:
        """URL of the server."""
        return self.server.endpoint

    @property
    def num_pending(self) -> int:
        """Requests that have no answer yet."""
        return self._pending

    @property
    def serving(self) -> bool:
        """Whether it takes requests: started, awake, and holding weights that were committed."""
        return self._session is not None and not self._fenced and not self._asleep

    @property
    def asleep(self) -> frozenset[MemoryTag]:
        """Parts whose memory is released."""
        return frozenset(self._asleep)

    async def start(self) -> None:
        """Start the server. Raises RunError, with the end of its log, if it does not come up."""
        await self.disconnect()
        await self.server.start()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS),
            timeout=aiohttp.ClientTimeout(total=None, connect=30),
            trust_env=False,
        )
        self._fenced, self._paused = True, False
        self._asleep = set()
        self._gate.set()

    async def stop(self) -> None:
        """End the requests and shut the server down."""
        if self._session is not None and self._pending and await self.server.alive():
            with suppress(EngineLost):  # it may leave before us
                await self.abort()
        await self.disconnect()
        await self.server.stop()

    async def disconnect(self) -> None:
        """End the connections, whatever the server does; requests end with EngineLost, and none is taken."""
        self._fenced = True
        if self._session is not None:
            await self._session.close()
            self._session = None

    def fence(self) -> None:
        """Take no requests until `committed`; for a push that is about to begin.

        Raises RuntimeError if requests are pending: SGLang does not say which of a request's tokens was sampled with
        which weights, so none may live through a push.
        """
        if self._pending:
            raise RuntimeError(f"a weight push while {self._pending} requests are pending; abort them first")
        if "weights" in self._asleep:
            raise RuntimeError("the engine's weights are asleep; wake(['weights']) before a push")
        self._fenced = True

    def committed(self, version: int) -> None:
        """A push of this version has gone through whole: serve it."""
        self._version, self._fenced = version, False

    # Control

    async def abort(self) -> None:
        """End all requests now; their samples come back with status ABORTED and what was sampled so far."""
        self._epoch += 1
        self._gate.set()  # those that wait here leave; the gate closes again behind them
        if self._paused:
            self._gate.clear()
        while self._pending:
            await self._post("/abort_request", {"rid": "", "abort_all": True})
            deadline = asyncio.get_running_loop().time() + ABORT_SECONDS
            while self._pending and asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.01)

    async def pause(self) -> None:
        """Stop decoding; requests are kept, and new ones queue."""
        self._paused = True
        self._gate.clear()
        await self._post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        """Go on decoding after `pause`."""
        await self._post("/continue_generation", {"torch_empty_cache": False})
        self._paused = False
        self._gate.set()

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        """Release the memory of these parts; weights that sleep are lost, and the engine is fenced.

        Raises RuntimeError if requests are pending: abort them first.
        """
        if self._pending:
            raise RuntimeError(f"sleep({list(tags)}) while {self._pending} requests are pending; abort them first")
        parts = [tag for tag in dict.fromkeys(tags) if tag not in self._asleep]
        if "weights" in parts:
            self._fenced = True
        if parts:
            await self._flush()
            await self._post("/release_memory_occupation", {"tags": [TAGS[tag] for tag in parts]})
            self._asleep.update(parts)

    async def _flush(self) -> None:
        """Drop the cache, and so make sure that the server is idle to its last batch: else it dies of releasing memory.

        The server is asked anew until it is: told to wait by itself, it looks at its idleness once a second.
        """
        deadline = asyncio.get_running_loop().time() + IDLE_SECONDS
        while True:
            status, content = await self._call("/flush_cache", {}, CONTROL_SECONDS)
            if status == 200:
                return
            if asyncio.get_running_loop().time() > deadline:
                raise RunError(f"engine {self.index} was not idle within {IDLE_SECONDS:g} s: {_said(content)}")
            await asyncio.sleep(0.005)

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory of these parts back."""
        parts = [tag for tag in dict.fromkeys(tags) if tag in self._asleep]
        if parts:
            await self._post("/resume_memory_occupation", {"tags": [TAGS[tag] for tag in parts]})
            self._asleep.difference_update(parts)

    async def healthy(self) -> bool:
        """Whether the server answers; while it is awake, whether it still generates."""
        if self._session is None or not await self.server.alive():
            return False
        path = "/model_info" if self._asleep or self._paused else "/health_generate"
        try:
            limit = aiohttp.ClientTimeout(total=60)
            async with self._session.get(self.endpoint + path, timeout=limit) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def _post(self, path: str, body: Mapping[str, Any]) -> None:
        status, content = await self._call(path, body, CONTROL_SECONDS)
        if status != 200:
            raise RunError(f"{path} of engine {self.index} failed with status {status}: {_said(content)}")

    async def _call(self, path: str, body: Mapping[str, Any], seconds: float | None) -> tuple[int, bytes]:
        """Post JSON; return status and answer. Raises EngineLost if there is none."""
        session = self._session
        if session is None:
            raise EngineLost(f"engine {self.index} is not started")
        try:
            limit = aiohttp.ClientTimeout(total=seconds, connect=30)
            async with session.post(self.endpoint + path, json=body, timeout=limit) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, TimeoutError, RuntimeError) as error:
            # RuntimeError: the session was closed under the request, because the engine is being started again.
            raise EngineLost(f"engine {self.index} does not answer {path}: {error!r}") from error

    # Generation

    async def generate(self, task: Task, tokens: Sequence[int], params: SamplingParams, key: Sequence[int]) -> Sample:
        """Sample a continuation of `tokens`; see `milepost.rollout.engine.Engine`.

        Raises EngineLost if the server goes away meanwhile.
        """
        if not self.serving:
            state = f"{' and '.join(sorted(self._asleep))} asleep" if self._asleep else "fenced; push weights first"
            raise RuntimeError(f"engine {self.index} takes no requests: {state}")
        body = self.request_body(tokens, params, key)
        epoch, version = self._epoch, self._version
        self._pending += 1
        try:
            await self._gate.wait()
            if epoch != self._epoch:
                return make_sample(task, tokens, [], [], version, Status.ABORTED, self._decode)
            status, content = await self._call("/generate", body, None)
        finally:
            self._pending -= 1
        if status == 400:
            raise MilepostError(f"engine {self.index} cannot serve a request of {len(tokens)} tokens: {_said(content)}")
        if status != 200:
            raise RunError(f"engine {self.index} failed on a request with status {status}: {_said(content)}")
        return self._sample(task, tokens, params, json.loads(content), version)

    def request_body(self, tokens: Sequence[int], params: SamplingParams, key: Sequence[int]) -> dict[str, Any]:
        """Return what `/generate` is asked. Raises MilepostError for tokens or settings the server cannot take."""
        check_params(params)
        ids = [int(token) for token in tokens]
        if not 0 < len(ids) < self._max_positions:
            raise MilepostError(
                f"a prompt has {len(ids)} tokens, expected 1 to {self._max_positions - 1}: the context has "
                f"{self._max_positions} positions and the response needs one; drop longer prompts (data.max_prompt_len)"
            )
        stop_tokens = sorted(self._end_tokens.union(params.stop_token_ids))
        for what, given in (("prompt", ids), ("stop_token_ids", stop_tokens)):
            if min(given, default=0) < 0 or max(given, default=0) >= self._vocab_size:
                raise MilepostError(
                    f"{what} has a token outside 0 to {self._vocab_size - 1}: tokenizer and model differ"
                )
        if self._seeded and params.min_p > 0:
            raise MilepostError("min_p ends a SGLang server with enable_deterministic_inference; give one of the two")
        sampling = {
            # Everything is said, so that no default of the checkpoint's generation_config.json slips in.
            "max_new_tokens": min(params.max_new_tokens, self._max_positions - len(ids)),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": params.min_p,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "repetition_penalty": 1.0,
            "stop": list(params.stop),
            "stop_token_ids": stop_tokens,
            "sampling_seed": sampling_seed(key),
        }
        return {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": -1}

    def _sample(
        self, task: Task, tokens: Sequence[int], params: SamplingParams, answer: Mapping[str, Any], version: int
    ) -> Sample:
        meta = answer["meta_info"]
        reason = meta["finish_reason"]
        if reason["type"] not in ENDINGS:
            raise RunError(f"engine {self.index} ended a request for a reason milepost does not know: {reason}")
        scored = meta.get("output_token_logprobs") or []
        sampled = answer.get("output_ids") or []
        if [token for _, token, *_ in scored] != sampled:
            raise RunError(
                f"engine {self.index} gave log-probs of other tokens than it sampled ({len(scored)} and {len(sampled)})"
            )
        if sampled and meta["weight_version"] != str(version):
            raise RunError(
                f"engine {self.index} answered with weights {meta['weight_version']!r}, expected version {version}; "
                "something beside milepost has pushed weights to it"
            )
        status = ENDINGS[reason["type"]]
        if status is Status.TRUNCATED and sampled:
            # SGLang looks at the length first, also where the last token that fits ends the response.
            text = self._decode(sampled) if params.stop else ""
            if sampled[-1] in self._end_tokens.union(params.stop_token_ids) or any(s in text for s in params.stop):
                status = Status.COMPLETED
        log_probs = [value for value, *_ in scored]
        return make_sample(task, tokens, sampled, log_probs, version, status, self._decode)


def make_sample(
    task: Task,
    tokens: Sequence[int],
    sampled: list[int],
    log_probs: Sequence[float],
    version: int,
    status: Status,
    decode: Callable[[list[int]], str],
) -> Sample:
    """Return the sample of a context `tokens` that was continued by `sampled`."""
    count, total = len(tokens), len(tokens) + len(sampled)
    is_sampled: NDArray[np.bool_] = np.arange(total) >= count
    scores = np.full(total, np.nan, np.float32)
    scores[count:] = log_probs
    return Sample(
        task=task,
        tokens=np.concatenate([np.asarray(tokens, np.int32), np.asarray(sampled, np.int32)]),
        trainable=is_sampled,
        log_probs=scores,
        versions=np.where(is_sampled, version, -1).astype(np.int32),
        status=status,
        text=decode(sampled) if sampled else "",
    )


def sampling_seed(key: Sequence[int]) -> int:
    """Return the seed of one request, 63 bits: the BLAKE2b digest of its key's integers."""
    digest = hashlib.blake2b(",".join(str(int(part)) for part in key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _said(content: bytes) -> str:
    return content.decode("utf-8", errors="replace")[:2000]
