"""Mooncake's transfer engine, as far as a push needs it: memory that is registered, and writes into it.

On a GPU, and over RDMA, it was not run by the tests; over TCP between CPUs it was.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from milepost.errors import TransportError
from milepost.weights.intake import Message
from milepost.weights.lines import route
from torch import Tensor

from milepost_p2p import REMEDY

RDMA_DEVICES = Path("/sys/class/infiniband")


def choose_protocol(asked: str) -> str:
    """Return `rdma` or `tcp`: what was asked for, or what this node can do where that was `auto`."""
    if asked != "auto":
        return asked
    return "rdma" if RDMA_DEVICES.is_dir() and any(RDMA_DEVICES.iterdir()) else "tcp"


class Endpoint:
    """This process's end of transfers with a protocol on one address. Raises TransportError if it cannot be had."""

    def __init__(self, address: str, protocol: str) -> None:
        os.environ.setdefault("GLOG_minloglevel", "1")  # it tells of every connection otherwise
        try:
            # An extra, and its library wants others of the system.
            from mooncake.engine import TransferEngine
        except ImportError as error:
            raise TransportError(f"transport p2p needs Mooncake's transfer engine: {error}; {REMEDY}") from error
        self._engine: Any = TransferEngine()
        code = self._engine.initialize(address, "P2PHANDSHAKE", protocol, "")
        if code:
            raise TransportError(
                f"Mooncake's transfer engine cannot use {protocol} on {address} (code {code}); "
                "choose transport.protocol: tcp, or look at what `milepost doctor` says of RDMA"
            )
        self.segment = f"{address}:{self._engine.get_rpc_port()}"
        """Where peers reach it."""

    def register(self, memory: Tensor) -> None:
        """Let memory [n] uint8 be read from and written to, as long as the tensor itself (not a view) is there.

        Raises TransportError if the system allows no more.
        """
        code = self._engine.register_memory(memory.data_ptr(), len(memory))
        if code:
            raise TransportError(
                f"{len(memory)} bytes could not be registered for transfers (code {code}); "
                "allow more locked memory (ulimit -l), or choose a smaller transport.bucket_mb"
            )
        # Memory that is freed first could come back to be registered twice.
        weakref.finalize(memory, self._engine.unregister_memory, memory.data_ptr())

    def write(self, segment: str, pointer: int, data: Tensor) -> None:
        """Write bytes [n] uint8, which are registered, to an address of a peer. Raises TransportError if it fails."""
        code = self._engine.transfer_sync_write(segment, data.data_ptr(), pointer, len(data))
        if code:
            raise TransportError(f"writing {len(data)} bytes to {segment} failed (code {code})")


_endpoints: dict[tuple[str, str], Endpoint] = {}
_lock = threading.Lock()


def endpoint(address: str, protocol: str) -> Endpoint:
    """Return this process's endpoint, made when it is first asked for and kept: it has threads and ports of its own."""
    with _lock:
        key = (address, protocol)
        if key not in _endpoints:
            _endpoints[key] = Endpoint(address, protocol)
        return _endpoints[key]


class MemoryIntake:
    """Implements `milepost.weights.intake.Intake`: registered memory that the sender writes into."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def open(self, message: Mapping[str, Any]) -> Message:
        """Register as much memory as the message asks for; answer where it is."""
        self.close()
        made = endpoint(route(message["host"]), message["protocol"])
        self._memory = torch.empty(int(message["bytes"]), dtype=torch.uint8, device=self._device)
        made.register(self._memory)
        return {"segment": made.segment, "pointer": self._memory.data_ptr()}

    def take(self, num_bytes: int) -> Tensor:
        """Return what was written."""
        if num_bytes > len(self._memory):
            raise TransportError(f"{num_bytes} bytes were announced, and {len(self._memory)} are registered")
        return self._memory[:num_bytes]

    def close(self) -> None:
        """Take the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)
