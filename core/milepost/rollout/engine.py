"""What an engine is: something that turns token ids into samples, and whose weights a transport can replace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from milepost.samples import Sample, Task

MemoryTag = Literal["weights", "kv_cache", "graphs"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. Log-probs are always of logits / temperature, before top-p, top-k and min-p."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 means greedy; log-probs are then of the plain logits."""
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Texts that end generation; the tokens that complete one are kept and trainable."""
    stop_token_ids: tuple[int, ...] = field(default=())
    """Tokens that end generation, beside the model's own end tokens."""


class Engine(Protocol):
    """Generates from the policy it last committed. Calls are async and may overlap."""

    @property
    def version(self) -> int:
        """Version of the weights being served; -1 before the first push."""
        ...

    async def start(self) -> None:
        """Bring the engine up."""
        ...

    async def stop(self) -> None:
        """Shut the engine down; pending requests end with status ABORTED."""
        ...

    async def generate(self, task: Task, tokens: Sequence[int], params: SamplingParams, key: Sequence[int]) -> Sample:
        """Sample a continuation of `tokens` (`task.tokens`, or a longer conversation).

        `key` (non-negative integers) seeds this one request: the same weights, tokens, parameters and key give the
        same continuation, whatever else is being generated. The returned sample begins with `tokens`.

        Raises MilepostError if the request can never be served (longer than the context), RuntimeError if the
        engine is fenced or asleep.
        """
        ...

    async def abort(self) -> None:
        """End all running requests now; their samples come back with status ABORTED."""
        ...

    async def pause(self) -> None:
        """Stop decoding; requests are kept."""
        ...

    async def resume(self) -> None:
        """Go on decoding after `pause`."""
        ...

    async def sleep(self, tags: Sequence[MemoryTag]) -> None:
        """Release the memory of these parts. Weights that sleep are lost: a push must follow the wake."""
        ...

    async def wake(self, tags: Sequence[MemoryTag]) -> None:
        """Take the memory of these parts back."""
        ...

    async def healthy(self) -> bool:
        """Whether the engine answers."""
        ...
