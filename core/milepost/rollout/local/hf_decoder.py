"""A decoder over any transformers causal model: the model's own forward, one call per token.

Slower than a decoder written for its family, and right for any model whose cache holds keys and values by position.
That is not taken on trust: the first complete weights are tried on a short text, cached against uncached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin

from milepost.errors import MilepostError

WINDOWED = "sliding_attention"
KNOWN_LAYERS = {"full_attention", WINDOWED}


class _RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Keys and values of one layer, [rows, heads, positions, size]; a step writes one position of each row."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True
        self.span = 0
        self.slots: tuple[Tensor, Tensor] | None = None
        """Row and position each new entry goes to."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is left to do."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new entries [R, heads, 1, size]; return all of them up to the longest row's."""
        assert self.slots is not None
        rows, positions = self.slots
        self.keys[rows, :, positions] = key_states[:, :, 0]
        self.values[rows, :, positions] = value_states[:, :, 0]
        return self.keys[: len(rows), :, : self.span], self.values[: len(rows), :, : self.span]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the length and offset of what `update` returns."""
        return self.span, 0

    def get_seq_length(self) -> int:
        """Return the longest row's length before this step."""
        return self.span - 1

    def get_max_cache_shape(self) -> int:
        """Return the positions there are."""
        return int(self.keys.shape[2])


class HFDecoder:
    """Implements `milepost.recipe.Decoder` over `AutoModelForCausalLM`.

    Raises ValueError, naming it, for a kind of layer whose state is not keys and values by position.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        fields = dict(config)
        self._config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        self.vocab_size = int(self._config.vocab_size)
        layer_types = set(getattr(self._config, "layer_types", None) or ())
        if layer_types - KNOWN_LAYERS:
            raise ValueError(
                f"config.json has layers of type {', '.join(sorted(layer_types - KNOWN_LAYERS))}, which the generic "
                f"decoder cannot run (it can: {', '.join(sorted(KNOWN_LAYERS))}); the model needs a recipe of its own"
            )
        self._mixed = WINDOWED in layer_types
        self._window: int | None = getattr(self._config, "sliding_window", None)
        self._model: Any = None
        self._targets: dict[str, Tensor] = {}
        self._loaded: set[str] = set()
        self._ready = self._checked = False
        self._shapes: list[tuple[int, int, int]] = []
        """Heads, key size and value size of each layer."""
        self._layers: list[_RowLayer] = []
        self._capacity = (0, 0)

    @torch.inference_mode()
    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy Hugging Face tensors in; see `milepost.recipe.Decoder`."""
        if self._model is None:
            with torch.random.fork_rng(devices=[]):  # initial values are overwritten, and cost nobody random numbers
                model = AutoModelForCausalLM.from_config(self._config, dtype=self.dtype)
            self._model = model.to(self.device).eval().requires_grad_(False)
            self._targets = self._model.state_dict(keep_vars=True)
        self._ready = False
        for name, tensor in tensors:
            target = self._targets.get(name)
            if target is None:
                raise KeyError(f"the model has no tensor {name!r}")
            if tensor.shape != target.shape:
                raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}, expected {tuple(target.shape)}")
            target.copy_(tensor.detach())
            self._loaded.add(name)

    @torch.inference_mode()
    def finish_load(self) -> None:
        """Check that all is there and, once, that the cache serves this model; see `milepost.recipe.Decoder`.

        Raises MilepostError if decoding with a cache gives other logits than the plain forward.
        """
        there = {id(self._targets[name]) for name in self._loaded}  # tied parameters come under one of their names
        named = () if self._model is None else self._model.named_parameters()
        missing = [name for name, parameter in named if id(parameter) not in there]
        if missing or self._model is None:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise KeyError(f"the model misses {', '.join(missing[:3]) or 'all tensors'}{more}")
        self._loaded.clear()
        self._ready = True
        if not self._checked:
            self._check()
            self._checked = True

    def _check(self) -> None:
        prompts = [[(7 * i + 1) % self.vocab_size for i in range(length)] for length in (3, 5)]
        self._shapes = [
            (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3]) for layer in self._run(prompts)[1]
        ]
        capacity = self._capacity
        self.allocate(2, 8)
        self.prefill([0, 1], prompts)
        cached = self.step(torch.tensor([2, 3], device=self.device) % self.vocab_size, torch.tensor([3, 5]))
        self.release()
        self.allocate(*capacity)
        for row, prompt in enumerate(prompts):
            plain = self._run([[*prompt, (2 + row) % self.vocab_size]])[0][0]
            bound = (1e-3 if self.dtype == torch.float32 else 0.1) * max(1.0, float(plain.abs().max()))
            difference = float((plain - cached[row]).abs().max())
            if difference > bound:
                raise MilepostError(
                    f"{type(self._model).__name__} gives other logits with a cache than without (by {difference:.3g}), "
                    "so the generic decoder cannot generate with it; it needs a model recipe of its own"
                )

    def unload(self) -> None:
        """Drop the weights."""
        self._model = None
        self._targets = {}
        self._loaded.clear()
        self._ready = False

    @torch.inference_mode()
    def allocate(self, rows: int, positions: int) -> None:
        """Make room, keeping what the cache holds; see `milepost.recipe.Decoder`."""
        rows, positions = max(rows, self._capacity[0]), max(positions, self._capacity[1])
        if (rows, positions) == self._capacity and self._layers:
            return
        layers = []
        for index, (heads, key_size, value_size) in enumerate(self._shapes):
            keys, values = (
                torch.zeros(rows, heads, positions, size, dtype=self.dtype, device=self.device)
                for size in (key_size, value_size)
            )
            if self._layers:
                old = self._layers[index]
                old_rows, _, old_positions, _ = old.keys.shape
                keys[:old_rows, :, :old_positions] = old.keys
                values[:old_rows, :, :old_positions] = old.values
            layers.append(_RowLayer(keys, values))
        self._layers, self._capacity = layers, (rows, positions)

    def release(self) -> None:
        """Drop the cache."""
        self._layers, self._capacity = [], (0, 0)

    @torch.inference_mode()
    def copy_rows(self, sources: Tensor, targets: Tensor, positions: int) -> None:
        """Copy cache entries between rows; see `milepost.recipe.Decoder`."""
        for layer in self._layers:
            for table in (layer.keys, layer.values):
                table[targets, :, :positions] = table[sources, :, :positions]

    def _run(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, list[Any]]:
        """Run prompts from their beginning; return logits [n, V] after each last token, and the cache's layers."""
        if not self._ready:
            raise RuntimeError("the decoder has no complete weights; load them and call finish_load first")
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        # Padding stands on the right, where the causal mask keeps it out of sight and decoding writes over it.
        ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.as_tensor(prompt)
        last, which = torch.unique(lengths - 1, return_inverse=True)
        cache = DynamicCache()
        output = self._model(
            input_ids=ids.to(self.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=last.to(self.device),
        )
        rows = torch.arange(len(prompts))
        return output.logits[rows.to(self.device), which.to(self.device)].float(), list(cache.layers)

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Run prompts into rows; see `milepost.recipe.Decoder`."""
        logits, layers = self._run(prompts)
        targets = torch.as_tensor(rows, device=self.device)
        for mine, theirs in zip(self._layers, layers, strict=True):
            length = theirs.keys.shape[2]
            mine.keys[targets, :, :length] = theirs.keys
            mine.values[targets, :, :length] = theirs.values
        return logits

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Advance the first rows by one token; see `milepost.recipe.Decoder`."""
        if not self._ready:
            raise RuntimeError("the decoder has no complete weights; load them and call finish_load first")
        span = int(positions.max()) + 1
        positions = positions.to(self.device)
        rows = torch.arange(len(tokens), device=self.device)
        for layer in self._layers:
            layer.span, layer.slots = span, (rows, positions)
        logits: Tensor = self._model(
            input_ids=tokens[:, None],
            position_ids=positions[:, None],
            attention_mask=self._masks(positions, span),
            past_key_values=Cache(layers=self._layers),
            use_cache=True,
        ).logits
        return logits[:, -1].float()

    def _masks(self, positions: Tensor, span: int) -> Tensor | dict[str, Tensor]:
        """Return what each row may look at: one additive mask [R, 1, 1, span], or one for each kind of layer."""
        offsets = positions[:, None] - torch.arange(span, device=self.device)
        hidden = offsets < 0
        full = self._additive(hidden)
        if self._window is None:
            return full
        windowed = self._additive(hidden | (offsets >= self._window))
        return {"full_attention": full, WINDOWED: windowed} if self._mixed else windowed

    def _additive(self, hidden: Tensor) -> Tensor:
        mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(hidden, torch.finfo(self.dtype).min)[:, None, None]
