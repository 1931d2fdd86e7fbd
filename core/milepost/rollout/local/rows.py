"""Requests, and the rows of the batch that is being decoded.

Row r of the batch is slot r of the decoder's cache. Per-row numbers are columns of arrays, so that a step costs a few
array operations however many rows there are; only what ends a row is looked at row by row.
"""

from __future__ import annotations

import asyncio
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

UNIFORMS_BLOCK = 64
"""Random numbers a request draws at once."""


def request_generator(key: Sequence[int]) -> np.random.Generator:
    """Return the random stream of one request: Philox, seeded by the key alone."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([int(part) for part in key])))


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
    generator: np.random.Generator
    future: asyncio.Future[Sample]
    tokens: list[NDArray[np.int32]] = field(default_factory=list)
    """Sampled tokens, one array per uninterrupted stretch."""
    log_probs: list[NDArray[np.float32]] = field(default_factory=list)
    versions: list[NDArray[np.int32]] = field(default_factory=list)
    uniforms: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    """Current block of random numbers."""

    @property
    def num_sampled(self) -> int:
        """Tokens sampled in finished stretches."""
        return sum(map(len, self.tokens))

    def context(self) -> NDArray[np.int32]:
        """Return all tokens so far, prompt included."""
        return np.concatenate([self.prompt, *self.tokens])

    def sample(self, status: Status, decode: Callable[[list[int]], str]) -> Sample:
        """Return the finished sample."""
        count = len(self.prompt)
        sampled = self.num_sampled
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
        self._decoder = decoder
        self._decode = decode
        self._sampler: Sampler | None = None
        self._is_stop = np.zeros(decoder.vocab_size, np.bool_)
        self._positions = torch.zeros(0, dtype=torch.int64)
        """Tokens of each row that stand in the cache, which is where its next one goes."""
        self._last = torch.zeros(0, dtype=torch.int64, device=decoder.device)
        """Each row's latest token, not in the cache yet."""
        self._counts = np.zeros(0, np.int64)
        """Tokens sampled since the row was added."""
        self._earlier = np.zeros(0, np.int64)
        """Tokens its request had sampled before."""
        self._limits = np.zeros(0, np.int64)
        """Tokens it may sample since it was added."""
        self._tokens = np.zeros((0, UNIFORMS_BLOCK), np.int32)
        self._probs = np.zeros((0, UNIFORMS_BLOCK), np.float32)
        self._uniforms = np.zeros((0, UNIFORMS_BLOCK), np.float32)

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def longest(self) -> int:
        """Positions the longest row occupies after its next step."""
        return int(self._positions[: len(self)].max()) + 1 if self.requests else 0

    def add(self, requests: Sequence[Request], lengths: Sequence[int]) -> None:
        """Append rows whose contexts, of these lengths, have been prefilled."""
        start, end = len(self), len(self) + len(requests)
        if end > len(self._counts):
            self._grow(max(end, 2 * len(self._counts)))
        self.requests.extend(requests)
        self._positions[start:end] = torch.as_tensor(lengths)
        self._counts[start:end] = 0
        self._earlier[start:end] = [request.num_sampled for request in requests]
        self._limits[start:end] = [request.limit - request.num_sampled for request in requests]
        for row, request in enumerate(requests, start):
            if len(request.uniforms):
                self._uniforms[row] = request.uniforms
        self._is_stop[list({token for request in requests for token in request.stop_tokens})] = True
        self._sampler = None

    def _grow(self, rows: int) -> None:
        more = rows - len(self._counts)
        self._positions = torch.cat([self._positions, self._positions.new_zeros(more)])
        self._last = torch.cat([self._last, self._last.new_zeros(more)])
        for name in ("_counts", "_earlier", "_limits", "_tokens", "_probs", "_uniforms"):
            old = getattr(self, name)
            setattr(self, name, np.concatenate([old, np.zeros((more, *old.shape[1:]), old.dtype)]))

    def step(self) -> list[tuple[int, Status]]:
        """Feed each row's latest token and sample the next; return the rows that ended, and how."""
        count = len(self)
        logits = self._decoder.step(self._last[:count], self._positions[:count])
        self._positions[:count] += 1
        return self.sample(0, logits)

    @torch.inference_mode()
    def sample(self, start: int, logits: Tensor) -> list[tuple[int, Status]]:
        """Sample one token for every row from `start` on, from `logits` [R - start, V]; return those that ended."""
        end = len(self)
        if start:
            sampler = Sampler.of([request.params for request in self.requests[start:]], *self._space)
        else:
            sampler = self._sampler = self._sampler or Sampler.of([r.params for r in self.requests], *self._space)
        columns = self._counts[start:end]
        uniforms = None if sampler.all_greedy else self._draw_uniforms(start, end)
        tokens, probs = sampler.draw(logits, uniforms)
        self._last[start:end] = tokens
        token_ids, values = tokens.cpu().numpy(), probs.cpu().numpy()
        if not np.isfinite(values).all():
            raise RunError("the model's logits are not finite; its weights hold a NaN or an infinity")
        if int(columns.max()) >= self._tokens.shape[1]:
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)], axis=1)
            self._probs = np.concatenate([self._probs, np.zeros_like(self._probs)], axis=1)
        index = np.arange(start, end)
        self._tokens[index, columns] = token_ids
        self._probs[index, columns] = values
        columns += 1
        ending = self._is_stop[token_ids] | (columns >= self._limits[start:end])
        suspects = set(np.nonzero(ending)[0].tolist())
        suspects.update(i for i, request in enumerate(self.requests[start:]) if request.params.stop)
        return [
            (start + i, status)
            for i in sorted(suspects)
            if (status := self._status(start + i, int(token_ids[i]))) is not None
        ]

    @property
    def _space(self) -> tuple[int, torch.device]:
        return self._decoder.vocab_size, self._decoder.device

    def _draw_uniforms(self, start: int, end: int) -> Tensor:
        column = (self._counts[start:end] + self._earlier[start:end]) % UNIFORMS_BLOCK
        for i in np.nonzero(column == 0)[0].tolist():
            request = self.requests[start + i]
            request.uniforms = request.generator.random(UNIFORMS_BLOCK, dtype=np.float32)
            self._uniforms[start + i] = request.uniforms
        return torch.from_numpy(self._uniforms[np.arange(start, end), column]).to(self._decoder.device)

    def _status(self, row: int, token: int) -> Status | None:
        """Return how the row ended with this latest token, or None if it goes on."""
        request = self.requests[row]
        if token in request.stop_tokens or (request.params.stop and self._has_stop_text(row)):
            return Status.COMPLETED
        return Status.TRUNCATED if self._counts[row] >= self._limits[row] else None

    def _has_stop_text(self, row: int) -> bool:
        # A stop text that the latest token completes ends in it, so a tail is enough: up to four tokens (bytes) a
        # character, and some for tokens without text.
        request, count = self.requests[row], int(self._counts[row])
        window = 4 * max(map(len, request.params.stop)) + 8
        tail = self._tokens[row, max(0, count - window) : count]
        if count < window and request.tokens:
            tail = np.concatenate([*request.tokens, tail])[-window:]
        text = self._decode(tail.tolist())
        return any(stop in text for stop in request.params.stop)

    def remove(self, rows: Sequence[int], version: int) -> list[Request]:
        """Take rows out, their tokens (sampled by weights `version`) kept in their requests; close the gaps."""
        gone = sorted(rows)
        removed = []
        for row in gone:
            request, count = self.requests[row], int(self._counts[row])
            request.tokens.append(self._tokens[row, :count].copy())
            request.log_probs.append(np.log(self._probs[row, :count]))
            request.versions.append(np.full(count, version, np.int32))
            removed.append(request)
        left = len(self) - len(gone)
        holes = [row for row in gone if row < left]
        movers = [row for row in range(left, len(self)) if row not in set(gone)]
        if holes:
            for hole, mover in zip(holes, movers, strict=True):
                self.requests[hole] = self.requests[mover]
            for name in ("_positions", "_last", "_counts", "_earlier", "_limits", "_tokens", "_probs", "_uniforms"):
                column = getattr(self, name)
                column[holes] = column[movers]
            device = self._decoder.device
            occupied = int(self._positions[holes].max())
            self._decoder.copy_rows(torch.tensor(movers, device=device), torch.tensor(holes, device=device), occupied)
        del self.requests[left:]
        self._sampler = None
        return removed
