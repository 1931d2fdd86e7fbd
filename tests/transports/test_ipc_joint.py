"""Engines of several devices: the ranks on these push together, and what one of the engine's ranks refuses all refuse.

The server here stands in for a SGLang engine of two tensor-parallel ranks, which needs two GPUs: it hands each packet
to the real receiver over a model that keeps half of every tensor.
"""

from __future__ import annotations

import base64
import json
import pickle
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked import forked
from milepost.errors import TransportError
from milepost.rollout.sglang.receiver import load
from milepost.weights.transport import EngineInfo, RankInfo, TensorSpec, World
from milepost_ipc.transport import IpcTransport
from torch import Tensor, nn

NAMES = ("a", "b", "c")
DEVICES = ("cpu:1", "cpu:0")
"""The engine's first rank is on the device of the trainer's second."""
WORLD = World((RankInfo(0, device="cpu:0"), RankInfo(1, device="cpu:1")))


class Half(nn.Module):
    """One tensor-parallel rank: it keeps two of the four rows of each tensor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rows = slice(2 * rank, 2 * rank + 2)
        self.tensors = nn.ParameterDict({name: nn.Parameter(torch.zeros(2, 4)) for name in NAMES})

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name].data.copy_(tensor[self.rows])


class Source:
    """Three tensors; with `lie`, the bytes that are sent are not those that the digests are of."""

    def __init__(self, value: float, lie: bool = False) -> None:
        self.named = [(name, torch.arange(16.0).view(4, 4) + value + i) for i, name in enumerate(NAMES)]
        self.lie = lie
        self.passes = 0

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(name, (4, 4), "float32") for name in NAMES]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        self.passes += 1
        for name, tensor in self.named:
            yield name, tensor + 1 if self.lie and self.passes == 2 and name == "b" else tensor

    def shards(self) -> Any:
        raise NotImplementedError


def rank_main(rank: int, endpoint: str, meeting: str, results: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    transport = IpcTransport(64)  # one tensor of 64 bytes at a time
    address = replace(transport.open(WORLD, [EngineInfo(0, endpoint, DEVICES, 2)]), verify=True)
    sender = transport.sender(address, rank)
    said: list[Any] = []
    for version, lie in ((1, False), (2, True), (3, False)):
        try:
            # what only the trainer's first rank sends is wrong
            report = sender.push(version, Source(100.0 * version, lie=lie and rank == 0))
            said.append((report.num_bytes, report.engines))
        except TransportError as error:
            said.append(str(error))
    results.put((rank, said))


@pytest.fixture
def served() -> Iterator[tuple[str, list[Half], list[Any]]]:
    models = [Half(0), Half(1)]
    told: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/update_weights_from_tensor":
                for model, packet in zip(models, body["serialized_named_tensors"], strict=True):
                    load(model, pickle.loads(base64.b64decode(packet)))
            else:
                told.append((self.path, body.get("new_version")))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", models, told
    server.shutdown()


def test_the_ranks_on_an_engines_devices_push_together(
    served: tuple[str, list[Half], list[Any]], tmp_path: Path
) -> None:
    endpoint, models, told = served
    context = forked()
    results = context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, endpoint, str(tmp_path / "meeting"), results)) for rank in (0, 1)
    ]
    for process in ranks:
        process.start()
    said = dict(results.get(timeout=120) for _ in ranks)
    for process in ranks:
        process.kill()  # it has said all it had to
        process.join()
    # the first of the engine's devices is the second rank's, which posts and reports
    assert said[1][0] == said[1][2] == (192, (0,))
    assert said[0][0] == said[0][2] == (0, ())
    assert said[0][1] == said[1][1]
    assert "tensor 'b' arrived with other bytes than were sent" in said[0][1]
    assert told == [
        (path, v) for v in ("1", "3") for path, v in (("/flush_cache", None), ("/update_weight_version", v))
    ]
    for model in models:
        for i, name in enumerate(NAMES):
            expected = torch.arange(16.0).view(4, 4)[model.rows] + 300.0 + i
            assert torch.equal(model.tensors[name].data, expected)


def test_an_engine_with_a_device_that_no_rank_is_on_is_refused() -> None:
    engine = EngineInfo(0, "http://10.0.0.1:1", ("cpu:0", "cpu:2"), 2)
    with pytest.raises(TransportError, match=r"engine 0 on localhost has no trainer rank on cpu:2; transport ipc"):
        IpcTransport(1).open(WORLD, [engine])
