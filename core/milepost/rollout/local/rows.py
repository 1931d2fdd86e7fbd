"""Requests, and the rows of the batch that is being decoded.

Row r of the batch is slot r of the decoder's cache. What a step produces is written as one line of a table with a
column per row, so that its cost hardly depends on the number of rows; only what ends a row is looked at row by row.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from milepost.errors import RunError
from milepost.recipe import Decoder
from milepost.rollout.engine import SamplingParams
from milepost.rollout.local.sampling import Sampler
from milepost.samples import Sample, Status, Task

BLOCK = 64
"""Steps for which random numbers are drawn at once."""


def stream_key(key: Sequence[int]) -> NDArray[np.uint64]:
    """Return the Philox key [2] of one request: the BLAKE2b digest of its integers."""
    digest = hashlib.blake2b(",".join(str(int(part)) for part in key).encode(), digest_size=16).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


class UniformStreams:
    """Random numbers in [0, 1) for any number of requests, each read at any place of its own Philox stream."""

    PER_COUNTER = 8
    """float32 numbers that one value of the counter gives."""

    def __init__(self) -> None:
        self._philox = np.random.Philox()
        self._generator = np.random.Generator(self._philox)

    def read(self, key: NDArray[np.uint64], start: int, count: int) -> NDArray[np.float32]:
        """Return numbers `start` to `start + count` of the stream of `key` [2], float32."""
        counter, skip = divmod(start, self.PER_COUNTER)
        self._philox.state = {
            "bit_generator": "Philox",
            "state": {"counter": np.array([counter, 0, 0, 0], np.uint64), "key": key},
            "buffer": np.zeros(4, np.uint64),
            "buffer_pos": 4,  # nothing is buffered
            "has_uint32": 0,
            "uinteger": 0,
        }
        return self._generator.random(skip + count, dtype=np.float32)[skip:]


@dataclass(slots=True, eq=False)
class Request:
    """One call of `generate`, waiting or running. What it sampled so far is kept across interruptions."""

    task: Task
    prompt: NDArray[np.int32]
    """The tokens it was called with."""
    params: SamplingParams
    stop_tokens: frozenset[int]
    """The model's end tokens and the request's own."""
    limit: int
    """Tokens it may sample, by `max_new_tokens` and by the context."""
    key: NDArray[np.uint64]
    """[2] names its stream of random numbers; its i-th token takes the i-th."""
    future: asyncio.Future[Sample]
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    """Sampled tokens, one array per uninterrupted stretch."""
    log_probs: list[NDArray[np.float32]] = field(default_factory=list)
    versions: list[NDArray[np.int32]] = field(default_factory=list)

    @property
    def num_sampled(self) -> int:
        """Tokens sampled in finished stretches."""
        return sum(map(len, self.tokens))

    def context(self) -> NDArray[np.int32]:
        """Return all tokens so far, prompt included."""
        return np.concatenate([self.prompt, *self.tokens])

    def sample(self, status: Status, decode: Callable[[list[int]], str]) -> Sample:
        """Return the finished sample."""
        count, sampled = len(self.prompt), self.num_sampled
        return Sample(
            task=self.task,
            tokens=self.context(),
            trainable=np.arange(count + sampled) >= count,
            log_probs=np.concatenate([np.full(count, np.nan, np.float32), *self.log_probs]),
            versions=np.concatenate([np.full(count, -1, np.int32), *self.versions]),
            status=status,
            text=decode(np.concatenate(self.tokens).tolist()) if sampled else "",
        )


class Rows:
    """The running batch: R rows, each a request, dense from 0.

    `decode` turns token ids into text; it is called each step only for requests with stop texts.
    """

    def __init__(self, decoder: Decoder, decode: Callable[[list[int]], str]) -> None:
        self.requests: list[Request] = []
        self.longest = 0
        """Positions the longest row occupies after its next step."""
        self._decoder = decoder
        self._decode = decode
        self._sampler: Sampler | None = None
        self._stop_texts: list[int] = []
        """Rows that watch for stop texts."""
        self._is_stop = np.zeros(decoder.vocab_size, np.bool_)
        """[V] tokens that end some request; whether it is the row's own is looked at then."""
        self._positions = torch.zeros(0, dtype=torch.int64)
        """[R] tokens that stand in the cache, which is where the row's next one goes."""
        self._last = torch.zeros(0, dtype=torch.int64, device=decoder.device)
        """[R] latest token, not in the cache yet."""
        self._line = 0
        """Line of the tables that was written last."""
        self._starts = np.zeros(0, np.int64)
        """[R] line of the row's first token."""
        self._ends = np.zeros(0, np.int64)
        """[R] line of the last token it may sample."""
        self._first_end = 0
        """The least of them."""
        self._tokens = np.zeros((BLOCK, 0), np.int32)
        self._probs = np.zeros((BLOCK, 0), np.float32)
        self._streams = UniformStreams()
        self._uniforms = np.zeros((BLOCK, 0), np.float32)
        """Line i serves steps whose line is i modulo BLOCK."""

    def __len__(self) -> int:
        return len(self.requests)

    @torch.inference_mode()
    def add(self, requests: Sequence[Request], lengths: Sequence[int], logits: Tensor) -> list[tuple[int, Status]]:
        """Append rows whose contexts, of these lengths, have been prefilled, and sample a first token for each.

        `logits` [n, V] float32 come from the prefill. Returns the rows that ended already, and how.
        """
        start, end = len(self), len(self) + len(requests)
        if start == 0:
            self._line = 0
        if end > self._tokens.shape[1]:
            more = max(end, 2 * self._tokens.shape[1]) - self._tokens.shape[1]
            for name in ("_tokens", "_probs", "_uniforms"):
                table = getattr(self, name)
                setattr(self, name, np.concatenate([table, np.zeros((len(table), more), table.dtype)], axis=1))
        self.requests.extend(requests)
        # The first tokens join the line that the other rows wrote last, so that the next line is everybody's.
        remaining = np.array([request.limit - request.num_sampled for request in requests])
        self._starts = np.concatenate([self._starts, np.full(len(requests), self._line)])
        self._ends = np.concatenate([self._ends, self._line + remaining - 1])
        self._positions = torch.cat([self._positions, torch.tensor(lengths)])
        self._last = torch.cat([self._last, self._last.new_zeros(len(requests))])
        self._is_stop[list(set().union(*(request.stop_tokens for request in requests)))] = True
        self._draw(range(start, end))
        self._regroup()
        return self._record(start, Sampler.of([request.params for request in requests], *self._space), logits)

    @property
    def _space(self) -> tuple[int, torch.device]:
        return self._decoder.vocab_size, self._decoder.device

    def _draw(self, rows: Sequence[int]) -> None:
        """Draw the random numbers these rows need from this line to the end of the block."""
        offset = self._line % BLOCK
        for row in rows:
            request = self.requests[row]
            if request.params.temperature > 0:
                start = request.num_sampled + self._line - int(self._starts[row])
                self._uniforms[offset:, row] = self._streams.read(request.key, start, BLOCK - offset)

    def _regroup(self) -> None:
        """Bring what is known of all rows together up to date."""
        self._sampler = None
        self._stop_texts = [row for row, request in enumerate(self.requests) if request.params.stop]
        self._first_end = int(self._ends.min()) if self.requests else 0
        self.longest = int(self._positions.max()) + 1 if self.requests else 0

    @torch.inference_mode()
    def step(self) -> list[tuple[int, Status]]:
        """Feed each row's latest token and sample the next; return the rows that ended, and how."""
        logits = self._decoder.step(self._last, self._positions)
        self._positions += 1
        self.longest += 1
        self._line += 1
        if self._line >= len(self._tokens):
            self._make_lines()
        if self._line % BLOCK == 0:
            self._draw(range(len(self)))
        if self._sampler is None:
            self._sampler = Sampler.of([request.params for request in self.requests], *self._space)
        return self._record(0, self._sampler, logits)

    def _make_lines(self) -> None:
        """Make room for the current line: over lines that no row needs any more if they are half of all, else anew."""
        unused = int(self._starts.min()) // BLOCK * BLOCK
        half = len(self._tokens) // 2
        for name in ("_tokens", "_probs"):
            table = getattr(self, name)
            moved = np.concatenate([table[unused:], np.zeros_like(table[:unused])])
            setattr(self, name, moved if unused >= half else np.concatenate([table, np.zeros_like(table)]))
        if unused >= half:
            self._line -= unused
            self._starts -= unused
            self._ends -= unused
            self._first_end -= unused

    def _record(self, start: int, sampler: Sampler, logits: Tensor) -> list[tuple[int, Status]]:
        """Sample into the current line for every row from `start` on; return those that ended."""
        line, end = self._line, len(self)
        uniforms = None
        if not sampler.all_greedy:
            uniforms = torch.from_numpy(self._uniforms[line % BLOCK, start:end]).to(logits.device)
        tokens, probs = sampler.draw(logits, uniforms)
        if start == 0:
            self._last = tokens
        else:
            self._last[start:] = tokens
        token_ids, values = tokens.cpu().numpy(), probs.cpu().numpy()
        if not np.minimum.reduce(values) > 0.0:  # what was drawn is likelier than 0, unless the logits are NaN
            raise RunError("the model's logits are not finite; its weights hold a NaN or an infinity")
        self._tokens[line, start:end] = token_ids
        self._probs[line, start:end] = values
        suspects = {start + row for row in self._is_stop[token_ids].nonzero()[0].tolist()}
        if line >= self._first_end:
            suspects.update(start + row for row in np.flatnonzero(self._ends[start:] <= line).tolist())
        suspects.update(row for row in self._stop_texts if row >= start)
        ended = []
        for row in sorted(suspects):
            status = self._status(row, int(token_ids[row - start]))
            if status is not None:
                ended.append((row, status))
        return ended

    def _status(self, row: int, token: int) -> Status | None:
        """Return how the row ended with this latest token, or None if it goes on."""
        request = self.requests[row]
        if token in request.stop_tokens or (request.params.stop and self._has_stop_text(row)):
            return Status.COMPLETED
        return Status.TRUNCATED if self._line >= self._ends[row] else None

    def _has_stop_text(self, row: int) -> bool:
        # A stop text that the latest token completes ends in it, so a tail is enough: up to four tokens (bytes) a
        # character, and some for tokens without text.
        request = self.requests[row]
        window = 4 * max(map(len, request.params.stop)) + 8
        start = max(int(self._starts[row]), self._line + 1 - window)
        tail = self._tokens[start : self._line + 1, row]
        if len(tail) < window and request.tokens:
            tail = np.concatenate([*request.tokens, tail])[-window:]
        text = self._decode(tail.tolist())
        return any(stop in text for stop in request.params.stop)

    def remove(self, rows: Sequence[int], version: int) -> list[Request]:
        """Take rows out, their tokens (sampled by weights `version`) kept in their requests; close the gaps."""
        gone = sorted(rows)
        removed = []
        for row in gone:
            request, lines = self.requests[row], slice(int(self._starts[row]), self._line + 1)
            request.tokens.append(self._tokens[lines, row].copy())
            request.log_probs.append(np.log(self._probs[lines, row]))
            request.versions.append(np.full(len(request.tokens[-1]), version, np.int32))
            removed.append(request)
        left = len(self) - len(gone)
        holes = [row for row in gone if row < left]
        if holes:
            leaving = set(gone)
            movers = [row for row in range(left, len(self)) if row not in leaving]
            self._move(movers, holes)
        del self.requests[left:]
        self._positions, self._last = self._positions[:left], self._last[:left]
        self._starts, self._ends = self._starts[:left], self._ends[:left]
        self._regroup()
        return removed

    @torch.inference_mode()
    def _move(self, sources: list[int], targets: list[int]) -> None:
        """Put rows in the place of others."""
        for source, target in zip(sources, targets, strict=True):
            self.requests[target] = self.requests[source]
        lines = slice(int(self._starts[sources].min()), self._line + 1)
        for table in (self._tokens[lines], self._probs[lines], self._uniforms):
            table[:, targets] = table[:, sources]
        for column in (self._positions, self._last):
            column[targets] = column[sources]
        for bounds in (self._starts, self._ends):
            bounds[targets] = bounds[sources]
        device = self._decoder.device
        occupied = int(self._positions[targets].max())
        self._decoder.copy_rows(torch.tensor(sources, device=device), torch.tensor(targets, device=device), occupied)
