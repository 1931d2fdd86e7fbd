"""Weight pushes between two processes of one node: python benchmarks/ipc_push.py [--device cuda] [--gigabytes 1].

One process stands for an engine, the other for a trainer rank; on a GPU both use the same one and the memory passes as
a CUDA IPC handle. Prints seconds and gigabytes a second of every push; the last one is verified at both ends.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from milepost.weights.sockets import SocketReceiver, TargetServer
from milepost.weights.transport import Manifest, TensorSpec, digest
from torch import Tensor

BUCKET_BYTES = 512 * 2**20


class Weights:
    """An engine's weights, without an engine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {}
        self.served = threading.Event()

    def fence(self) -> None:
        self.served.clear()

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name in self.tensors:
                self.tensors[name].copy_(tensor)
            else:
                self.tensors[name] = tensor.to(self.device, copy=True)

    def serve(self, version: int) -> None:
        self.served.set()


def engine(device: str, pipe: Connection) -> None:
    weights = Weights(torch.device(device))
    work: queue.Queue[tuple[Callable[[], None], Future[None]]] = queue.Queue()

    def submit(function: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        work.put((function, future))
        return future

    server = TargetServer(weights, submit)
    pipe.send(str(server.path))
    while True:
        function, future = work.get()
        try:
            function()
            future.set_result(None)
        except Exception as error:  # noqa: BLE001  the sender is told
            future.set_exception(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--pushes", type=int, default=4)
    options = parser.parse_args()
    device = torch.device(options.device)
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    process = spawn.Process(target=engine, args=(options.device, theirs), daemon=True)
    process.start()
    path = Path(mine.recv())

    count = max(1, round(options.gigabytes * 1e9 / (2 * 4096 * 2048)))
    tensors = [(f"w{i}", torch.randn(4096, 2048, device=device).to(torch.bfloat16)) for i in range(count)]
    num_bytes = sum(tensor.numel() * 2 for _, tensor in tensors)
    per_bucket = max(1, BUCKET_BYTES // (2 * 4096 * 2048))
    for push in range(options.pushes):
        verify = push == options.pushes - 1
        specs = [TensorSpec(n, tuple(t.shape), "bfloat16", digest(t) if verify else None) for n, t in tensors]
        begun = time.perf_counter()
        receiver = SocketReceiver(path, device)
        receiver.prepare(Manifest(push, tuple(specs)))
        for first in range(0, count, per_bucket):
            receiver.receive(tensors[first : first + per_bucket])
        receiver.commit(push)
        receiver.close()
        seconds = time.perf_counter() - begun
        kind = "verified" if verify else "plain"
        print(f"push {push}: {num_bytes / 1e9:.2f} GB in {seconds:.3f} s, {num_bytes / seconds / 1e9:.1f} GB/s, {kind}")
    process.kill()


if __name__ == "__main__":
    main()
