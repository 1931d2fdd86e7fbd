"""The local engine: continuous batching in this process, on top of a recipe's decoder.

Requests queue; a task of the running event loop admits them, prefills their prompts (once for all samples of a prompt),
and advances the batch token by token, giving the event loop its turn every few steps and whenever a row ends. Such a
row leaves at once: its future resolves, so rewards run while others generate, and the batch shrinks.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from milepost.errors import MilepostError
from milepost.recipe import Decoder
from milepost.rollout.engine import MemoryTag, SamplingParams
from milepost.rollout.local.rows import Request, Rows, stream_key
from milepost.rollout.local.sampling import check_params
from milepost.samples import Sample, Status, Task
from milepost.weights.local import local_endpoint, register_target, unregister_target

STEPS_PER_TURN = 4
"""Decode steps after which the event loop gets its turn at the latest; a turn costs a system call."""


@dataclass(slots=True)
class Counters:
    """What the engine has done since it was made."""

    prompts: int = 0
    """Requests admitted."""
    prefills: int = 0
    """Prompts run through the model; fewer than `prompts` where samples share one."""
    prefill_tokens: int = 0
    steps: int = 0
    """Decode steps of the whole batch."""
    step_rows: int = 0
    """Rows of all steps together."""


class LocalEngine:
    """Implements `milepost.rollout.engine.Engine` in this process.

    Equal requests with equal keys give equal continuations whatever runs beside them, up to the floating-point
    difference a batch's shape makes; an equal sequence of calls gives equal bits. All calls belong to one thread.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        decode: Callable[[list[int]], str],
        end_token_ids: Iterable[int],
        max_positions: int,
        max_running_requests: int = 512,
        max_cache_tokens: int | None = None,
        prefill_tokens: int = 8192,
        name: str = "0",
    ) -> None:
        """Make an engine without weights: it is fenced until a transport has pushed some.

        `decode` turns sampled token ids into text. `max_positions` is the longest context, `max_running_requests` the
        most rows decoded at once, `max_cache_tokens` the most cache entries (rows x positions; None for no limit),
        `prefill_tokens` the most tokens (padding included) of one prefill, unless a single prompt is longer.
        """
        self.name = name
        self.counters = Counters()
        self._decoder = decoder
        self._decode = decode
        self._end_tokens = frozenset(end_token_ids)
        self._max_positions = max_positions
        self._max_rows = max_running_requests
        self._max_cache_tokens = max_cache_tokens
        self._prefill_tokens = prefill_tokens
        self._version = -1
        self._started = self._paused = False
        self._fenced = True
        self._asleep: set[MemoryTag] = set()
        self._failure: BaseException | None = None
        self._waiting: deque[Request] = deque()
        self._rows = Rows(decoder, decode)
        self._capacity = (0, 0)
        self._task: asyncio.Task[None] | None = None

    # The engine's state.

    @property
    def version(self) -> int:
        """Version of the weights being served; -1 before the first push."""
        return self._version

    @property
    def endpoint(self) -> str:
        """Where transports of this process find the engine."""
        return local_endpoint(self.name)

    @property
    def num_pending(self) -> int:
        """Requests waiting or running."""
        return len(self._waiting) + len(self._rows)

    async def start(self) -> None:
        """Make the engine known to transports of this process. Raises MilepostError if its name is taken."""
        register_target(self.name, self)
        self._started, self._failure = True, None

    async def stop(self) -> None:
        """Shut the engine down; pending requests end with status ABORTED, weights and cache are dropped."""
        await self.abort()
        if self._started:
            unregister_target(self.name)
        self._started, self._fenced = False, True
        self._release_cache()
        self._decoder.unload()

    async def healthy(self) -> bool:
        """Whether the engine answers: it was started and its decoding has not failed."""
        return self._started and self._failure is None

    async def pause(self) -> None:
        """Stop decoding; requests are kept, and new ones queue."""
        self._paused = True

    async def resume(self) -> None:
        """Go on decoding after `pause`."""
        self._paused = False
        self._kick()

    async def abort(self) -> None:
        """End all requests now; their samples come back with status ABORTED and what was sampled so far."""
        self._abort()

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        """Release the memory of these parts; weights that sleep are lost, and the engine is fenced.

        Raises RuntimeError if requests are running: pause (they are kept, and prefilled again later) or abort first.
        """
        self._require_quiet(f"sleep({list(tags)})")
        self._asleep.update(tags)
        if "kv_cache" in tags:
            self._release_cache()
        if "weights" in tags:
            self._decoder.unload()
            self._fenced = True

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory of these parts back; it is allocated when it is needed."""
        self._asleep.difference_update(tags)
        if not self._paused:
            self._kick()

    # Weights; called by milepost.weights.local.

    def fence(self) -> None:
        """Serve nothing until `serve`. Requests kept by `pause` are prefilled again, under the new weights.

        Raises RuntimeError if requests are running or the weights' memory sleeps.
        """
        self._require_quiet("a weight push")
        if "weights" in self._asleep:
            raise RuntimeError("the engine's weights are asleep; wake(['weights']) before a push")
        self._fenced = True

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy tensors into the engine's own weights. Raises as `Decoder.load`."""
        if not self._fenced:
            raise RuntimeError("weights were loaded into an engine that is serving; fence it first")
        self._decoder.load(tensors)

    def serve(self, version: int) -> None:
        """All tensors are in: serve them as `version`. Raises KeyError, and stays fenced, if one is missing."""
        self._decoder.finish_load()
        self._version, self._fenced = version, False

    def _require_quiet(self, act: str) -> None:
        if self.num_pending and not self._paused:
            raise RuntimeError(f"{act} while {self.num_pending} requests are pending; pause or abort them first")
        self._waiting.extendleft(reversed(self._rows.remove(range(len(self._rows)), self._version)))

    # Generation.

    async def generate(self, task: Task, tokens: Sequence[int], params: SamplingParams, key: Sequence[int]) -> Sample:
        """Sample a continuation of `tokens`; see `milepost.rollout.engine.Engine`."""
        self._require_serving()
        request = self._request(task, tokens, params, key)
        self._waiting.append(request)
        self._kick()
        try:
            return await request.future
        except asyncio.CancelledError:
            self._drop(request)
            raise

    def _require_serving(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the engine's decoding failed earlier; start it again") from self._failure
        if not self._started:
            raise RuntimeError("the engine was not started")
        if self._asleep:
            raise RuntimeError(f"the engine's {' and '.join(sorted(self._asleep))} are asleep; wake them first")
        if self._fenced:
            raise RuntimeError("the engine is fenced: no weights, or a push that has not committed; push weights first")

    def _request(self, task: Task, tokens: Sequence[int], params: SamplingParams, key: Sequence[int]) -> Request:
        check_params(params)
        prompt = np.asarray(tokens, np.int32)
        if not 0 < len(prompt) < self._max_positions:
            raise MilepostError(
                f"a prompt has {len(prompt)} tokens, expected 1 to {self._max_positions - 1}: the context has "
                f"{self._max_positions} positions and the response needs one; drop longer prompts (data.max_prompt_len)"
            )
        stop_tokens = self._end_tokens.union(params.stop_token_ids)
        for what, ids in (("prompt", prompt.tolist()), ("stop_token_ids", stop_tokens)):
            if min(ids, default=0) < 0 or max(ids, default=0) >= self._decoder.vocab_size:
                raise MilepostError(
                    f"{what} has a token outside 0 to {self._decoder.vocab_size - 1}: tokenizer and model differ"
                )
        limit = min(params.max_new_tokens, self._max_positions - len(prompt))
        if self._max_cache_tokens is not None and len(prompt) + limit > self._max_cache_tokens:
            raise MilepostError(
                f"a request may take {len(prompt) + limit} tokens, more than the cache's {self._max_cache_tokens}"
            )
        future = asyncio.get_running_loop().create_future()
        return Request(task, prompt, params, stop_tokens, limit, stream_key(key), future)

    def _drop(self, request: Request) -> None:
        """Forget a request whose caller went away."""
        if request in self._waiting:
            self._waiting.remove(request)
        elif request in self._rows.requests:
            self._rows.remove([self._rows.requests.index(request)], self._version)

    def _resolve(self, requests: Iterable[Request], status: Status) -> None:
        for request in requests:
            if not request.future.done():
                request.future.set_result(request.sample(status, self._decode))

    def _abort(self) -> None:
        self._resolve(self._rows.remove(range(len(self._rows)), self._version), Status.ABORTED)
        waiting = list(self._waiting)
        self._waiting.clear()
        self._resolve(waiting, Status.ABORTED)

    # The decode loop.

    @property
    def _decodes(self) -> bool:
        return not (self._paused or self._fenced or self._asleep) and self.num_pending > 0

    def _kick(self) -> None:
        """Start the decode task if there is something for it to do and none runs."""
        loop = asyncio.get_running_loop()
        if self._decodes and (self._task is None or self._task.done() or self._task.get_loop() is not loop):
            self._task = loop.create_task(self._run(), name=f"decode {self.endpoint}")
            self._task.add_done_callback(self._ended)

    async def _run(self) -> None:
        quiet = 0
        while self._decodes:
            self._admit()
            ended: Collection[tuple[int, Status]] = ()
            if len(self._rows):
                self._reserve(len(self._rows), self._rows.longest)
                self.counters.steps += 1
                self.counters.step_rows += len(self._rows)
                ended = self._rows.step()
                self._retire(ended)
            quiet = quiet + 1 if len(self._rows) and not ended else 0
            if quiet % STEPS_PER_TURN == 0:
                await asyncio.sleep(0)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """See to the requests that the decode task leaves behind: none is left without an answer."""
        if task.cancelled():
            self._abort()
        elif (error := task.exception()) is not None:
            self._failure = error
            for request in (*self._rows.requests, *self._waiting):
                if not request.future.done():
                    request.future.set_exception(error)
            self._rows = Rows(self._decoder, self._decode)
            self._waiting.clear()
        else:
            self._kick()

    def _retire(self, ended: Collection[tuple[int, Status]]) -> None:
        if not ended:
            return
        statuses = dict(ended)
        requests = self._rows.remove(sorted(statuses), self._version)
        for row, request in zip(sorted(statuses), requests, strict=True):
            self._resolve([request], statuses[row])

    def _reserve(self, rows: int, positions: int) -> None:
        """Make the cache large enough, doubling what is too small so that growing step by step stays cheap."""
        old_rows, old_positions = self._capacity
        if rows <= old_rows and positions <= old_positions:
            return
        if rows > old_rows:
            old_rows = max(rows, min(2 * old_rows, self._max_rows))
        if positions > old_positions:
            old_positions = max(positions, min(2 * old_positions, self._max_positions))
        if self._max_cache_tokens is not None and old_rows * old_positions > self._max_cache_tokens:
            old_rows, old_positions = max(rows, self._capacity[0]), max(positions, self._capacity[1])
        self._capacity = old_rows, old_positions
        self._decoder.allocate(*self._capacity)

    def _release_cache(self) -> None:
        self._capacity = (0, 0)
        self._decoder.release()

    def _admit(self) -> None:
        """Move waiting requests into free rows: prefill, share, sample their first tokens."""
        requests = self._take()
        if not requests:
            return
        contexts = [tuple(request.context().tolist()) for request in requests]
        start, end = len(self._rows), len(self._rows) + len(requests)
        first: dict[tuple[int, ...], int] = {}
        for row, context in enumerate(contexts, start):
            first.setdefault(context, row)
        longest = max(map(len, contexts))
        self._reserve(end, longest + 1)
        logits = self._prefill(first)
        order = {context: index for index, context in enumerate(first)}
        shared = [(first[context], row) for row, context in enumerate(contexts, start) if first[context] != row]
        device = self._decoder.device
        if shared:
            sources, targets = torch.tensor(shared, device=device).unbind(1)
            self._decoder.copy_rows(sources, targets, longest)
            logits = logits[torch.tensor([order[context] for context in contexts], device=device)]
        self.counters.prompts += len(requests)
        self._retire(self._rows.add(requests, [len(context) for context in contexts], logits))

    def _prefill(self, first: dict[tuple[int, ...], int]) -> Tensor:
        """Run each distinct context into its row; return logits [n, V] in the order of `first`."""
        contexts = list(first)
        by_length = sorted(range(len(contexts)), key=lambda index: len(contexts[index]))
        pieces: list[Tensor] = []
        chunk: list[int] = []
        for index in by_length:
            if chunk and (len(chunk) + 1) * len(contexts[index]) > self._prefill_tokens:
                pieces.append(self._prefill_chunk(chunk, contexts, first))
                chunk = []
            chunk.append(index)
        pieces.append(self._prefill_chunk(chunk, contexts, first))
        logits = torch.cat(pieces)
        return logits[torch.tensor(by_length).argsort().to(logits.device)]

    def _prefill_chunk(
        self, chunk: Sequence[int], contexts: Sequence[tuple[int, ...]], first: dict[tuple[int, ...], int]
    ) -> Tensor:
        self.counters.prefills += len(chunk)
        self.counters.prefill_tokens += sum(len(contexts[index]) for index in chunk)
        return self._decoder.prefill([first[contexts[index]] for index in chunk], [contexts[index] for index in chunk])

    def _take(self) -> list[Request]:
        """Take the requests from the queue for which there is room."""
        taken: list[Request] = []
        if not self._waiting or len(self._rows) == self._max_rows:
            return taken
        ceiling = max((len(request.prompt) + request.limit for request in self._rows.requests), default=0)
        while self._waiting and len(self._rows) + len(taken) < self._max_rows:
            request = self._waiting[0]
            ceiling = max(ceiling, len(request.prompt) + request.limit)
            rows = len(self._rows) + len(taken) + 1
            if self._max_cache_tokens is not None and rows * ceiling > self._max_cache_tokens and rows > 1:
                break
            taken.append(self._waiting.popleft())
        return taken
