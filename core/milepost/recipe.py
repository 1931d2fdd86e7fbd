"""What a model recipe builds: how a checkpoint becomes something that trains and something that generates."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from milepost.weights.conversion import Conversion


@dataclass(frozen=True, slots=True)
class HFModel:
    """A Hugging Face causal model taken apart, so that logits are made only in chunks, from hidden states."""

    model: nn.Module
    """The whole model, whose `named_parameters` and `state_dict` carry Hugging Face names."""
    body: nn.Module
    """Token ids to hidden states [B, T, H], final norm included."""
    head: nn.Module
    """Hidden states to logits; its `weight` is [V, H]."""
    logit_scale: float = 1.0
    """Logits are multiplied by this."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap)."""
    batch_body: Callable[[Tensor], Tensor] | None = None
    """What the body does to a batch of token ids [B, T], causal, positions from 0, no padding seen: hidden states
    [B, T, H], written out over the same parameters. The torch trainer takes it on a CPU where the body's layers are
    not recomputed; None where there is none."""


class Decoder(Protocol):
    """Batched single-token decoding over a static key-value cache; the local engine's model.

    Rows are slots of the cache. `prefill` fills slots from prompts; `copy_rows` shares a prefilled prompt between
    slots; `step` advances the first rows by one token. Entry p of a row holds the keys and values of its token p.
    """

    vocab_size: int
    """Rows of the output head; padded rows are tokens like others, as the trainer scores them too."""
    device: torch.device

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy Hugging Face tensors in, in any order and any number of calls.

        Raises KeyError for a name the model does not have, ValueError for another shape than the model's.
        """
        ...

    def finish_load(self) -> None:
        """All tensors are in: derive what decoding needs. Raises KeyError naming those that are missing."""
        ...

    def unload(self) -> None:
        """Drop the weights; a complete `load` and `finish_load` must come before the next token."""
        ...

    def allocate(self, rows: int, positions: int) -> None:
        """Make room for at least this many rows and positions, keeping what the cache holds."""
        ...

    def release(self) -> None:
        """Drop the cache."""
        ...

    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Run prompts into the given rows; return logits [len(rows), V] float32 after each one's last token."""
        ...

    def copy_rows(self, sources: Tensor, targets: Tensor, positions: int) -> None:
        """Copy the first `positions` entries of rows `sources` [n] into rows `targets` [n] (int64, no row in both)."""
        ...

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Feed one token [R] at its position [R] to rows 0..R-1; return logits [R, V] float32.

        Both int64; `tokens` on the decoder's device, `positions` on the host, where its extremes are read.
        """
        ...


class HFHalf(Protocol):
    """The half of a recipe that the torch trainer and the local engine use."""

    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> HFModel:
        """Load a checkpoint with the attention implementation `milepost_packed` (milepost.training.packing)."""
        ...

    def decoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Decoder:
        """Make an empty decoder for the local engine from the checkpoint's `config.json`.

        Raises ValueError naming a value of the config that it cannot serve.
        """
        ...


@dataclass(frozen=True, slots=True)
class MegatronModel:
    """A model as Megatron-core builds it, read from a checkpoint's `config.json`."""

    transformer: Mapping[str, Any]
    """Fields of Megatron's TransformerConfig that the architecture decides; parallelism, precision and recompute are
    the trainer's."""
    layer_spec: Callable[[Any], Any]
    """From the finished TransformerConfig to the ModuleSpec of one layer, or a sequence of one spec for every layer."""
    conversions: tuple[Conversion, ...]
    """How Hugging Face tensors become Megatron's; also the order in which a weight source yields them."""
    vocab_size: int
    padded_vocab_size: int
    """Rows of the embedding and the output head; those beyond `vocab_size` take no part in the distribution."""
    tied_embeddings: bool
    max_positions: int
    inverse_frequencies: Tensor
    """[head_dim / 2] float32, of the rotary embedding."""


class MegatronHalf(Protocol):
    """The half of a recipe that the Megatron trainer uses. The value head of a critic is the trainer's."""

    def describe(self, config: Mapping[str, Any]) -> MegatronModel:
        """Read a `config.json`. Raises ValueError naming a value that is missing, malformed or not understood."""
        ...


class Recipe(Protocol):
    """A model family: how to load, run, convert and count it."""

    @property
    def hf(self) -> HFHalf:
        """What the torch trainer and the local engine use."""
        ...

    @property
    def megatron(self) -> MegatronHalf | None:
        """What the Megatron trainer uses; None where the family has no Megatron half."""
        ...
