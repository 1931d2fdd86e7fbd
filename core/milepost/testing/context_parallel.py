"""A simulated context-parallel pair: two threads that each hold half of every sample and sum over both for real."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
WORLD = 2


class UnequalCallsError(RuntimeError):
    """One rank asked for a sum over both and the other had already finished."""


def zigzag(num_tokens: int) -> tuple[Tensor, Tensor]:
    """Positions [n] each of two ranks holds of a sample: of four chunks, the outer two and the inner two."""
    chunks = torch.arange(num_tokens).tensor_split(2 * WORLD)
    return torch.cat([chunks[0], chunks[3]]), torch.cat([chunks[1], chunks[2]])


class Exchange:
    """All-reduce between two threads. Sums stay in one autograd graph, so a single backward reaches both halves."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._posted: tuple[list[Tensor], list[Tensor]] = ([], [])
        self._finished = [False, False]

    def all_reduce(self, rank: int) -> Callable[[Tensor], Tensor]:
        """Return the differentiable sum over both ranks, as `rank` calls it."""

        def total(x: Tensor) -> Tensor:
            mine, others = self._posted[rank], self._posted[1 - rank]
            with self._condition:
                mine.append(x)
                turn = len(mine)
                self._condition.notify_all()
                self._condition.wait_for(lambda: len(others) >= turn or self._finished[1 - rank])
                if len(others) < turn:
                    raise UnequalCallsError(
                        f"rank {rank} summed over samples {turn} times, rank {1 - rank} only {len(others)} times; "
                        "call sample_sum and sample_mean the same number of times whatever the tokens are"
                    )
                return self._posted[0][turn - 1] + self._posted[1][turn - 1]

        return total

    def finish(self, rank: int) -> None:
        """This rank will not call any more."""
        with self._condition:
            self._finished[rank] = True
            self._condition.notify_all()


def run_pair(work: Callable[[int, Callable[[Tensor], Tensor]], T]) -> tuple[T, T]:
    """Run `work(rank, all_reduce)` on two threads and return both results; raises what a rank raised."""
    exchange = Exchange()
    results: dict[int, T] = {}
    errors: list[Exception] = []

    def rank_main(rank: int) -> None:
        try:
            results[rank] = work(rank, exchange.all_reduce(rank))
        except Exception as error:  # noqa: BLE001 - raised again in the calling thread
            errors.append(error)
        finally:
            exchange.finish(rank)

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # What a rank did wrong by itself says more than the other's complaint that it is gone.
        raise min(errors, key=lambda error: isinstance(error, UnequalCallsError))
    return results[0], results[1]
