"""One trainer rank in a process of its own: it hosts any `Trainer`, alone or in a `torch.distributed` world."""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from milepost.cluster.building import build_trainer, prepare_process
from milepost.cluster.failures import Outcome
from milepost.cluster.host import Host
from milepost.cluster.memory import read_memory
from milepost.cluster.messages import PlanMessage, Setup
from milepost.cluster.shares import Delivery, Share
from milepost.components import Transport
from milepost.config.plan import Plan
from milepost.training.ranks import DataParallelRanks
from milepost.training.schedule import Schedule, StepSchedule
from milepost.training.trainer import Part, Role, Trainer, Want
from milepost.weights.transport import Address, Sender


class RankHost(Host):
    """Runs one rank's trainer; every call but `open_store` is made on all ranks together."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._store: TCPStore | None = None
        self._share = Share()
        self._plan: Plan
        self._device: torch.device
        self._trainer: Trainer
        self._sender: Sender

    def open_store(self, host: str, timeout: float) -> Outcome:
        """On rank 0: open the store through which ranks find each other; return its port on `host`."""

        def open_store() -> int:
            # Left to itself the store would listen on every interface.
            listening = socket.create_server((host, 0))
            port: int = listening.getsockname()[1]
            self._store = TCPStore(
                host,
                port,
                is_master=True,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
            return port

        return self.run("open store", open_store)

    def build(self, message: PlanMessage, rank: int, host: str, port: int) -> Outcome:
        """Join the world and build the trainer; returns its `World`."""

        def build() -> object:
            self._plan = message.restore(self.setup.name)
            device, dtype = prepare_process(self._plan, self.setup.threads)
            self._device = device
            ranks = None
            if self._plan.world_size > 1 or self._plan.config.trainer.backend != "torch":
                self._join(rank, host, port, device)
            if self._plan.world_size > 1 and self._plan.config.trainer.backend == "torch":
                ranks = DataParallelRanks()
            self._trainer = build_trainer(self._plan, device, dtype, ranks)
            return self._trainer.world

        return self.run("build trainer", build)

    def _join(self, rank: int, host: str, port: int, device: torch.device) -> None:
        """Join the process group. The environment says the same, for libraries that read it there."""
        world_size = self._plan.world_size
        os.environ |= {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": "0",  # each rank sees its own GPU alone
        }
        if host == "127.0.0.1":
            # All on one node: gloo would otherwise look for the interface of the host's name.
            loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
            os.environ["GLOO_SOCKET_IFNAME"] = loopback
        # Longer than the controller waits: it is to find ranks where they stand, not after they gave up.
        timeout = timedelta(seconds=2 * self._plan.config.cluster.stall_timeout + 60)
        store = self._store or TCPStore(host, port, is_master=False, timeout=timeout)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)

    def forward(self, role: Role, schedule: Schedule, delivery: Delivery, want: Collection[Want]) -> Outcome:
        """Run the role over this rank's share; returns columns as arrays."""

        def forward() -> object:
            batch = self._share.take(delivery)
            columns = self._trainer.forward(role, schedule, batch, want)
            self._share.keep(delivery, columns)
            return {name: column.numpy() for name, column in columns.items()}

        return self.run(f"forward {role}", forward)

    def step(self, role: Role, schedule: StepSchedule, delivery: Delivery) -> Outcome:
        """Take one optimizer step; returns its `StepResult`."""
        return self.run(f"step {role}", lambda: self._trainer.step(role, schedule, self._share.take(delivery)))

    def offload(self, role: Role, parts: Collection[Part]) -> Outcome:
        """Move parts of a role to host memory."""
        return self.run(f"offload {role}", lambda: self._trainer.offload(role, parts))

    def onload(self, role: Role, parts: Collection[Part]) -> Outcome:
        """Bring parts of a role back to the device."""
        return self.run(f"onload {role}", lambda: self._trainer.onload(role, parts))

    def memory(self) -> Outcome:
        """Return the `Memory` of this rank's device."""
        return self.run("measure memory", lambda: read_memory(self._device))

    def save(self, folder: Path) -> Outcome:
        """Write the state of all trained roles."""
        return self.run("save", lambda: self._trainer.save(folder))

    def load(self, folder: Path) -> Outcome:
        """Restore what `save` wrote."""
        return self.run("load", lambda: self._trainer.load(folder))

    def open_sender(self, address: Address, rank: int) -> Outcome:
        """Open this rank's side of the transport."""

        def open_sender() -> None:
            transport: Transport = self._plan.transport.build()
            self._sender = transport.sender(address, rank)

        return self.run("open transport", open_sender)

    def push(self, version: int, engines: Collection[int] | None) -> Outcome:
        """Push the actor's weights; returns this rank's `PushReport`."""
        return self.run("push", lambda: self._sender.push(version, self._trainer.source("actor"), engines))

    def close(self) -> Outcome:
        """Release everything and leave the process group."""

        def close() -> None:
            self._trainer.close()
            if dist.is_initialized():
                dist.destroy_process_group()

        return self.run("close", close)
