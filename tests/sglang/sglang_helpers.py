"""What the tests of SGLang engines share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from milepost.rollout.sglang.engine import SGLangEngine
from milepost.rollout.sglang.server import SGLangServer
from milepost.samples import Task
from milepost.tokenizer import Tokenizer
from milepost.weights.transport import Shard, TensorSpec
from torch import Tensor

MAX_POSITIONS = 60
"""Longest context of the engines here; the policy has 64 positions."""


@dataclass
class Served:
    """An engine with a real server, and the event loop it lives in."""

    engine: SGLangEngine
    server: SGLangServer
    tokenizer: Tokenizer
    model_path: Path
    runner: asyncio.Runner

    def run(self, work: Any) -> Any:
        """Run a coroutine to its end; no test may wait for ever."""
        return self.runner.run(asyncio.wait_for(work, 120))


def task(index: int = 0, tokens: Sequence[int] = (5, 6, 7)) -> Task:
    return Task(index, "", tuple(tokens))


@dataclass
class Tensors:
    """A `WeightSource` of given tensors."""

    named: list[tuple[str, Tensor]]

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(n, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for n, t in self.named]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named

    def shards(self) -> Iterator[Shard]:
        raise NotImplementedError


def hf_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def weights_of(model: Any) -> Tensors:
    """Its parameters under their Hugging Face names; a tied head once."""
    return Tensors([(name, parameter.detach()) for name, parameter in model.named_parameters()])


@torch.no_grad()
def log_probs_of(model: Any, tokens: Sequence[int], temperature: float) -> Tensor:
    """[T] log-prob of each token given those before it, by a full forward; NaN for the first."""
    ids = torch.tensor([list(tokens)])
    scores = torch.log_softmax(model(ids).logits[0, :-1].double() / temperature, -1)
    found = scores.gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([found.new_full((1,), float("nan")), found])
