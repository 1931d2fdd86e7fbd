"""Process groups of a sending rank and the engines' ranks, apart from any that either side has.

They are made of a store and a number alone, so that they fit into a trainer rank, into a SGLang server's process and
beside each other in one process, and leave torch's default group as it is. NCCL was not run by the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast

import torch
from milepost.errors import TransportError
from milepost.weights.intake import Message
from milepost.weights.lines import route
from torch import Tensor
from torch._C._distributed_c10d import Backend, PrefixStore, ProcessGroupGloo, TCPStore

SOURCE = 0
"""The sending rank's number in its group."""


class Group:
    """One member of a group. Raises TransportError if the others do not come in time.

    Args:
        store: the store that all members meet at.
        name: of the group; no two groups of a store share one.
        rank: this member's number.
        size: number of members.
        backend: `nccl` or `gloo`.
        timeout: seconds that meeting, and any broadcast, may take.
        device: what is broadcast lies here.
    """

    def __init__(
        self,
        store: TCPStore,
        name: str,
        *,
        rank: int,
        size: int,
        backend: str,
        timeout: float,
        device: torch.device,
    ) -> None:
        self._limit = timedelta(seconds=timeout)
        self._device = device
        self.size = size
        try:
            self._group: Backend | None = self._make(PrefixStore(name, store), rank, backend, store.host)
        except RuntimeError as error:
            raise TransportError(
                f"member {rank} of {size} could not meet the others of a {backend} group at {store.host}:{store.port} "
                f"within {timeout:g} s: {error}"
            ) from error

    def _make(self, store: PrefixStore, rank: int, backend: str, host: str) -> Backend:
        if backend == "nccl":
            from torch._C._distributed_c10d import ProcessGroupNCCL

            torch.cuda.set_device(self._device)
            options = ProcessGroupNCCL.Options()
            options._timeout = self._limit
            group: Backend = ProcessGroupNCCL(store, rank, self.size, options)
            # Communicators are made by the first use; a member that is missing is to be noticed here.
            self._await(group, torch.zeros(1, dtype=torch.uint8, device=self._device))
            return group
        settings = cast("Any", ProcessGroupGloo)._Options()
        settings._timeout = self._limit
        # The interface that leads to the store: that of the host's name may lead nowhere.
        settings._devices = [ProcessGroupGloo.create_device(hostname=route(host))]
        return ProcessGroupGloo(store, rank, self.size, settings)

    def _await(self, group: Backend, data: Tensor) -> None:
        cast("Any", group).broadcast(data, SOURCE, self._limit).wait(self._limit)
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()

    def broadcast(self, data: Tensor) -> None:
        """Send [n] uint8 from the source, or receive it there. Raises TransportError if a member is gone or stuck."""
        group = self._group
        if group is None:
            raise TransportError("the group was given up: another of its members failed")
        try:
            self._await(group, data)
        except RuntimeError as error:
            self.close()
            raise TransportError(f"broadcasting {len(data)} bytes failed: {error}") from error

    def close(self) -> None:
        """Leave; members that wait for this one are told by their connections."""
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            group.abort()


class GroupIntake:
    """Implements `milepost.weights.intake.Intake`: an engine's member of a group."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._group: Group | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def open(self, message: Mapping[str, Any]) -> Message:
        """Join the group that the message describes."""
        limit = float(message["timeout"])
        backend = str(message["backend"])
        if backend == "gloo":
            self._device = torch.device("cpu")
        try:
            store = TCPStore(message["host"], int(message["port"]), is_master=False, timeout=timedelta(seconds=limit))
        except RuntimeError as error:
            where = f"{message['host']}:{message['port']}"
            raise TransportError(f"the engine cannot reach the trainer's store at {where}: {error}") from error
        self._group = Group(
            store,
            message["name"],
            rank=int(message["rank"]),
            size=int(message["size"]),
            backend=backend,
            timeout=limit,
            device=self._device,
        )
        return {}

    def take(self, num_bytes: int) -> Tensor:
        """Receive a bucket."""
        if self._group is None:
            raise TransportError("a bucket was sent to an engine that has joined no group")
        if len(self._memory) < num_bytes or self._memory.device != self._device:
            self._memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        bucket = self._memory[:num_bytes]
        self._group.broadcast(bucket)
        return bucket

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
