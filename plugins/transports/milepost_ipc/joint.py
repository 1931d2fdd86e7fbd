"""Pushes to an engine of several GPUs, by the ranks on these GPUs together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from milepost.errors import EngineGone, TransportError
from milepost.weights.sglang import HttpReceiver


class JointReceiver(HttpReceiver):
    """One rank's side of an engine whose GPUs are several ranks'; all of these make every call together.

    SGLang copies a buffer that lies on another GPU than its own, and a verdict written into a copy reaches nobody. So
    each rank hands a buffer on its own GPU to the engine's rank there. The first posts what all of them made.
    """

    def __init__(self, endpoint: str, device: torch.device, group: Any, order: Sequence[int]) -> None:
        """`group` is a process group that carries objects; `order` its ranks in the order of the engine's GPUs."""
        super().__init__(endpoint, device)
        self._group = group
        self._order = tuple(order)
        self._posts = dist.get_rank(group) == self._order[0]

    def hand_over(self, packets: Sequence[str], version: str | None = None) -> None:
        """Have one act done. Raises TransportError on all ranks if one rank of the engine refuses it."""
        gathered = self._gather(packets[0])
        together = [gathered[rank] for rank in self._order]
        self._agree((lambda: self.post(together, version)) if self._posts else None)
        self._agree(lambda: self._buffer.check(self._endpoint))

    def serve(self, version: int) -> None:
        """Let the server answer with the version; the first rank tells it."""
        self._agree((lambda: HttpReceiver.serve(self, version)) if self._posts else None)

    def _gather(self, value: Any) -> list[Any]:
        gathered: list[Any] = [None] * len(self._order)
        dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def _agree(self, act: Callable[[], None] | None) -> None:
        """Do something here, and wait for the others. Raises on all ranks what was raised on one."""
        failure: tuple[str | None, str] | None = None
        try:
            if act is not None:
                act()
        except TransportError as error:
            failure = (error.endpoint if isinstance(error, EngineGone) else None, str(error))
        for found in self._gather(failure):
            if found is not None:
                endpoint, message = found
                raise TransportError(message) if endpoint is None else EngineGone(endpoint, message)
