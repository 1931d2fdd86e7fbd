"""Weight pushes to an engine on another device: python benchmarks/broadcast_push.py [--device cuda] [--gigabytes 1].

One process stands for a trainer rank, the other for an engine; with `--device cuda` they use the first and the second
GPU of the machine and NCCL, otherwise gloo. Prints seconds and gigabytes a second of every push of the transport
`broadcast`, manifest, copies into buckets and into the engine's weights and commit included, beside a bare
`torch.distributed.broadcast` of the same bytes between the same processes. The last push is verified: every tensor is
hashed at both ends.

Only gloo was run so far, for the mechanics; NCCL was not.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import milepost
import torch
import torch.distributed as dist
from milepost.weights.sockets import TargetServer
from milepost.weights.transport import EngineInfo, RankInfo, Shard, TensorSpec, World
from torch import Tensor

SHAPE = (4096, 2048)


class Weights:
    """An engine's weights, without an engine."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.tensors: dict[str, Tensor] = {}

    def fence(self) -> None:
        """Nothing is served here."""

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in tensors:
            if name in self.tensors:
                self.tensors[name].copy_(tensor)
            else:
                self.tensors[name] = tensor.to(self.device, copy=True)

    def serve(self, version: int) -> None:
        """Nothing is served here."""


class Source:
    """Random weights in bfloat16."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.named = [(f"w{i}", torch.randn(SHAPE, device=device).bfloat16()) for i in range(count)]
        self.num_bytes = sum(tensor.numel() * 2 for _, tensor in self.named)

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, SHAPE, "bfloat16") for name, _ in self.named]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named

    def shards(self) -> Iterator[Shard]:
        raise NotImplementedError("the transport asks for whole tensors")


def device_of(name: str, rank: int) -> torch.device:
    if name == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def bare(device: torch.device, rank: int, store: str, num_bytes: int, repeats: int) -> list[float]:
    """Seconds of broadcasts of the bytes in one piece."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2)
    data = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    seconds = []
    for _ in range(repeats + 1):
        dist.barrier()
        begun = time.perf_counter()
        dist.broadcast(data, 0)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    dist.destroy_process_group()
    return seconds[1:]  # the first one connects


def engine(name: str, store: str, num_bytes: int, repeats: int, pipe: Connection) -> None:
    device = device_of(name, 1)
    bare(device, 1, store, num_bytes, repeats)
    weights = Weights(device)
    work: queue.Queue[tuple[Callable[[], None], Future[None]]] = queue.Queue()

    def submit(function: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        work.put((function, future))
        return future

    server = TargetServer(weights, submit, host="127.0.0.1", device=device)
    pipe.send(server.endpoint)
    while True:
        function, future = work.get()
        try:
            future.set_result(function())
        except Exception as error:  # noqa: BLE001  the sender is told
            future.set_exception(error)


def show(what: str, num_bytes: int, seconds: float) -> None:
    print(f"{what}: {num_bytes / 1e9:.2f} GB in {seconds:.3f} s, {num_bytes / seconds / 1e9:.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--pushes", type=int, default=4)
    parser.add_argument("--bucket-mb", type=int, default=512)
    options = parser.parse_args()
    device = device_of(options.device, 0)
    source = Source(max(1, round(options.gigabytes * 1e9 / (2 * SHAPE[0] * SHAPE[1]))), device)
    spawn = multiprocessing.get_context("spawn")
    mine, theirs = spawn.Pipe()
    with TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        arguments = (options.device, store, source.num_bytes, options.pushes, theirs)
        process = spawn.Process(target=engine, args=arguments, daemon=True)
        process.start()
        for seconds in bare(device, 0, store, source.num_bytes, options.pushes):
            show("bare broadcast", source.num_bytes, seconds)
        endpoint = mine.recv()
    names = ("cpu", "cpu") if options.device == "cpu" else ("GPU-0", "GPU-1")
    transport = milepost.resolve("transport", "broadcast", {"bucket_mb": options.bucket_mb})
    address = transport.open(World((RankInfo(0, device=names[0]),)), [EngineInfo(0, endpoint, (names[1],))])
    sender = transport.sender(address, 0)
    for push in range(options.pushes):
        if push == options.pushes - 1:
            sender = transport.sender(replace(address, verify=True), 0)
        report = sender.push(push, source)
        kind = "verified push" if push == options.pushes - 1 else "push"
        show(f"{kind} {push}", report.num_bytes, report.seconds)
    print(f"backend {address.details['backend']}")
    process.kill()


if __name__ == "__main__":
    main()
