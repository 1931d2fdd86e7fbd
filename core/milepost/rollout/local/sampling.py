"""Drawing tokens from logits: one draw for a whole batch whose rows may each have their own parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from milepost.errors import MilepostError
from milepost.rollout.engine import SamplingParams


@lru_cache(maxsize=256)  # a rollout's requests share theirs
def check_params(params: SamplingParams) -> None:
    """Raise MilepostError, naming the value, if the parameters make no sense."""
    problems = {
        "max_new_tokens": (params.max_new_tokens, params.max_new_tokens >= 1, "at least 1"),
        "temperature": (params.temperature, 0.0 <= params.temperature < float("inf"), "finite and not negative"),
        "top_p": (params.top_p, 0.0 < params.top_p <= 1.0, "in (0, 1]"),
        "top_k": (params.top_k, params.top_k >= 0, "0 (no limit) or more"),
        "min_p": (params.min_p, 0.0 <= params.min_p <= 1.0, "in [0, 1]"),
        "stop": (params.stop, all(params.stop), "texts that are not empty"),
    }
    for name, (value, good, expected) in problems.items():
        if not good:
            raise MilepostError(f"sampling parameter {name} is {value!r}, expected {expected}")


@dataclass(frozen=True, slots=True)
class Sampler:
    """The sampling parameters of R rows, as tensors; None where no row uses one."""

    greedy: Tensor | None
    """[R] bool."""
    all_greedy: bool
    temperature: Tensor | None
    """[R, 1] float32, 1 for greedy rows."""
    top_k: Tensor | None
    """[R, 1] int64."""
    top_p: Tensor | None
    """[R, 1] float32."""
    min_p: Tensor | None
    """[R, 1] float32."""

    @classmethod
    def of(cls, rows: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> Sampler:
        """Gather the rows' parameters."""

        def column(values: list[float], neutral: float, dtype: torch.dtype) -> Tensor | None:
            if all(value == neutral for value in values):
                return None
            return torch.tensor(values, dtype=dtype, device=device)[:, None]

        greedy = [row.temperature == 0 for row in rows]
        return cls(
            greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
            all_greedy=all(greedy),
            temperature=column([row.temperature or 1.0 for row in rows], 1.0, torch.float32),
            top_k=column([min(row.top_k or vocab_size, vocab_size) for row in rows], vocab_size, torch.int64),
            top_p=column([row.top_p for row in rows], 1.0, torch.float32),
            min_p=column([row.min_p for row in rows], 0.0, torch.float32),
        )

    def _filter(self, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the filtered probabilities, likeliest first and unnormalised, and the tokens they belong to: [R, V].

        Each filter looks at the unfiltered distribution, and a token must pass all of them. The likeliest always does.
        """
        probs, order = probs.sort(dim=-1, descending=True, stable=True)
        keep = torch.ones_like(probs, dtype=torch.bool)
        if self.top_k is not None:
            keep &= torch.arange(probs.shape[-1], device=probs.device) < self.top_k
        if self.top_p is not None:
            keep &= probs.cumsum(-1) - probs < self.top_p
        if self.min_p is not None:
            keep &= probs >= probs[:, :1] * self.min_p
        keep[:, 0] = True
        return probs * keep, order

    def draw(self, logits: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
        """Draw one token per row by inverting the distribution function at `uniforms` [R] in [0, 1).

        `logits` [R, V] float32; `uniforms` may be None if all rows are greedy. Returns tokens [R] int64 and the
        probability [R] float32 of each under softmax(logits / temperature), before any filter. Where logits are not
        finite the probability is not finite or not positive.
        """
        if self.temperature is not None:
            logits = logits / self.temperature
        probs = logits.softmax(-1)
        if self.all_greedy or uniforms is None:
            tokens = logits.argmax(-1, keepdim=True)
            return tokens[:, 0], probs.gather(1, tokens)[:, 0]
        filtered = self.top_k is not None or self.top_p is not None or self.min_p is not None
        weights, order = self._filter(probs) if filtered else (probs, None)
        cumulative = weights.cumsum(-1)
        # The first entry above u * total: with u < 1 it exists and has weight, whatever float32 rounds to.
        tokens = torch.searchsorted(cumulative, uniforms[:, None] * cumulative[:, -1:], right=True)
        tokens.clamp_(max=logits.shape[-1] - 1)  # only where logits are NaN
        if order is not None:
            tokens = order.gather(1, tokens)
        if self.greedy is not None:
            tokens = torch.where(self.greedy[:, None], logits.argmax(-1, keepdim=True), tokens)
        return tokens[:, 0], probs.gather(1, tokens)[:, 0]
