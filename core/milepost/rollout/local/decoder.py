"""A lean decoder for Llama-like models: one hand-written forward, no library call per token.

Serves Qwen3, Qwen2, Llama and Mistral without sliding windows. Query, key and value projections are one matrix, so are
gate and up; matrices are kept transposed; keys and values lie side by side in one static cache, so that a step writes
them with one copy. In float32 the norms' weights are folded into what follows them, and a norm is then
x / sqrt(|x|^2 + size * eps), three operations where the library takes six.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from milepost.components import ModelLayout
from milepost.rollout.local.rope import inverse_frequencies, rotation_table
from milepost.weights.layouts import dense_layout, has_qk_norm, integer, projection_biases

POSITIONS_STEP = 64
"""Cache positions are allocated in multiples of this, which also keeps every row aligned alike."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a Hugging Face tensor goes: part of a fused tensor, transposed if it is a matrix of a projection."""

    target: str
    start: int
    shape: tuple[int, ...]
    """Shape of the Hugging Face tensor."""
    transposed: bool


class LeanDecoder:
    """Implements `milepost.recipe.Decoder` for Llama-like models.

    Raises ValueError, naming the value, for a `config.json` it cannot serve exactly.
    """

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self.layout: ModelLayout = dense_layout(config)
        self.vocab_size = self.layout.vocab_size
        self.dtype, self.device = dtype, device
        self._check(config)
        self._eps = float(config.get("rms_norm_eps", 1e-6))
        self._intermediate = integer(config, "intermediate_size")
        self._qk_norm = has_qk_norm(config)
        self._biases = projection_biases(config)
        # Folding rounds each product once more, which float32 does not notice and bfloat16 does.
        self._fold = dtype == torch.float32
        self._eps_terms = {
            size: torch.tensor(math.sqrt(size * self._eps), dtype=dtype, device=device)
            for size in (self.layout.hidden_size, self.layout.head_dim)
        }
        self._frequencies = inverse_frequencies(config)
        self._rotation = torch.empty(0, device=device)
        self._slots = self._plan()
        self._tensors: dict[str, Tensor] = {}
        self._loaded: set[str] = set()
        self._ready = False
        self._norms: Tensor | None = None
        self._head = torch.empty(0, device=device)
        self._layers: list[tuple[Tensor | None, ...]] = []
        self._cache = torch.empty(0, device=device)
        self._flat = self._keys_values = self._cache
        """The cache as [layers, rows x positions, width] and as [layers, 2, rows, kv_heads, positions, D]."""
        self._offsets = torch.empty(0, dtype=torch.int64)

    @staticmethod
    def _check(config: Mapping[str, Any]) -> None:
        activation = config.get("hidden_act", "silu")
        if activation != "silu":
            raise ValueError(f"config.json has hidden_act {activation!r}, expected silu; set `model.recipe: generic`")
        layer_types = config.get("layer_types") or []
        windowed = config.get("use_sliding_window", config.get("model_type") == "mistral")
        if "sliding_attention" in layer_types or (windowed and config.get("sliding_window")):
            raise ValueError(
                "config.json has sliding-window attention; set `model.recipe: generic` to generate with it"
            )

    def _plan(self) -> dict[str, _Slot]:
        layout, hidden, inner = self.layout, self.layout.hidden_size, self._intermediate
        query, key_value = layout.num_heads * layout.head_dim, layout.num_kv_heads * layout.head_dim
        qkv_bias, output_bias, mlp_bias = self._biases
        slots = {
            "model.embed_tokens.weight": _Slot("embed", 0, (self.vocab_size, hidden), transposed=False),
            "model.norm.weight": _Slot("norm", 0, (hidden,), transposed=False),
        }
        if not layout.tied_embeddings:
            slots["lm_head.weight"] = _Slot("head", 0, (self.vocab_size, hidden), transposed=True)
        for index in range(layout.num_layers):

            def add(name: str, target: str, start: int, size: int, width: int, bias: bool, at: int = index) -> None:
                slots[f"model.layers.{at}.{name}.weight"] = _Slot(f"{at}.{target}", start, (size, width), True)
                if bias:
                    slots[f"model.layers.{at}.{name}.bias"] = _Slot(f"{at}.{target}_bias", start, (size,), False)

            add("self_attn.q_proj", "qkv", 0, query, hidden, qkv_bias)
            add("self_attn.k_proj", "qkv", query, key_value, hidden, qkv_bias)
            add("self_attn.v_proj", "qkv", query + key_value, key_value, hidden, qkv_bias)
            add("self_attn.o_proj", "output", 0, hidden, query, output_bias)
            add("mlp.gate_proj", "gate_up", 0, inner, hidden, mlp_bias)
            add("mlp.up_proj", "gate_up", inner, inner, hidden, mlp_bias)
            add("mlp.down_proj", "down", 0, hidden, inner, mlp_bias)
            norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
            if self._qk_norm:
                norms |= {"self_attn.q_norm": layout.head_dim, "self_attn.k_norm": layout.head_dim}
            for name, size in norms.items():
                target = f"{index}.{name.removeprefix('self_attn.')}"
                slots[f"model.layers.{index}.{name}.weight"] = _Slot(target, 0, (size,), False)
        return slots

    def _make_tensors(self) -> None:
        """Allocate the fused tensors that the slots point into."""
        extents: dict[str, tuple[int, tuple[int, ...], bool]] = {}
        for slot in self._slots.values():
            end = slot.start + slot.shape[0]
            if end > extents.get(slot.target, (0,))[0]:
                extents[slot.target] = (end, slot.shape[1:], slot.transposed)
        for target, (size, rest, transposed) in extents.items():
            shape = (*rest, size) if transposed else (size, *rest)
            self._tensors[target] = torch.empty(shape, dtype=self.dtype, device=self.device)

    @torch.inference_mode()
    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy Hugging Face tensors in; see `milepost.recipe.Decoder`."""
        if not self._tensors:
            self._make_tensors()
        self._ready = False
        for name, tensor in tensors:
            if name == "lm_head.weight" and self.layout.tied_embeddings:
                continue
            slot = self._slots.get(name)
            if slot is None:
                raise KeyError(f"the model has no tensor {name!r}")
            if tuple(tensor.shape) != slot.shape:
                raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}, expected {slot.shape}")
            target, end = self._tensors[slot.target], slot.start + slot.shape[0]
            if slot.transposed:
                target[:, slot.start : end].copy_(tensor.detach().t())
            else:
                target[slot.start : end].copy_(tensor.detach())
            self._loaded.add(name)

    @torch.inference_mode()
    def finish_load(self) -> None:
        """Fold norms and line up the layers; see `milepost.recipe.Decoder`."""
        missing = sorted(self._slots.keys() - self._loaded)
        if missing:
            more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
            raise KeyError(f"the model misses {', '.join(missing[:3])}{more}")
        self._loaded.clear()
        tensors, layout = self._tensors, self.layout
        # A folded norm leaves out the root of its size, so its weight carries it.
        scale, head_scale = math.sqrt(layout.hidden_size), math.sqrt(layout.head_dim)
        if layout.tied_embeddings:
            head = tensors["embed"].t()
            self._head = (head * (tensors["norm"] * scale)[:, None]).contiguous() if self._fold else head
        elif self._fold:
            self._head = tensors["head"].mul_((tensors["norm"] * scale)[:, None])
        else:
            self._head = tensors["head"]
        self._layers = []
        norms = []
        for index in range(layout.num_layers):
            attention_norm, mlp_norm = (
                tensors[f"{index}.{name}"] for name in ("input_layernorm", "post_attention_layernorm")
            )
            if self._fold:
                tensors[f"{index}.qkv"].mul_((attention_norm * scale)[:, None])
                tensors[f"{index}.gate_up"].mul_((mlp_norm * scale)[:, None])
            names = ("qkv", "qkv_bias", "output", "output_bias", "gate_up", "gate_up_bias", "down", "down_bias")
            layer = [tensors.get(f"{index}.{name}") for name in names]
            layer += [None, None] if self._fold else [attention_norm, mlp_norm]
            self._layers.append(tuple(layer))
            if self._qk_norm:
                rows = [tensors[f"{index}.q_norm"]] * layout.num_heads + [
                    tensors[f"{index}.k_norm"]
                ] * layout.num_kv_heads
                weight = torch.stack(rows) * (head_scale if self._fold else 1.0)
                # The signed sines meet x rolled by half a head, so their weights are rolled too.
                norms.append(torch.stack([weight, weight.roll(layout.head_dim // 2, -1)]))
        self._norms = torch.stack(norms) if norms else None
        self._ready = True

    def unload(self) -> None:
        """Drop the weights."""
        self._tensors.clear()
        self._layers.clear()
        self._loaded.clear()
        self._head = torch.empty(0, device=self.device)
        self._norms = None
        self._ready = False

    @torch.inference_mode()
    def allocate(self, rows: int, positions: int) -> None:
        """Make room, keeping what the cache holds; see `milepost.recipe.Decoder`."""
        layout, old = self.layout, self._cache
        old_rows, old_positions = old.shape[1:3] if old.numel() else (0, 0)
        if rows <= old_rows and positions <= old_positions:
            return
        rows, positions = max(rows, old_rows), max(positions, old_positions)
        positions = -(-positions // POSITIONS_STEP) * POSITIONS_STEP
        width = 2 * layout.num_kv_heads * layout.head_dim
        # Zeros, because masked entries are still multiplied by a weight of zero and must be finite.
        cache = torch.zeros(layout.num_layers, rows, positions, width, dtype=self.dtype, device=self.device)
        if old.numel():
            cache[:, :old_rows, :old_positions] = old
        self._cache = cache
        self._flat = cache.view(layout.num_layers, rows * positions, width)
        self._keys_values = cache.view(*cache.shape[:3], 2, layout.num_kv_heads, layout.head_dim).permute(
            0, 3, 1, 4, 2, 5
        )
        self._offsets = torch.arange(rows) * positions
        self._rotation = rotation_table(self._frequencies, positions).to(self.device)

    def release(self) -> None:
        """Drop the cache."""
        self._cache = self._flat = self._keys_values = torch.empty(0, device=self.device)
        self._rotation = torch.empty(0, device=self.device)

    @torch.inference_mode()
    def copy_rows(self, sources: Tensor, targets: Tensor, positions: int) -> None:
        """Copy cache entries between rows; see `milepost.recipe.Decoder`."""
        self._cache[:, targets, :positions] = self._cache[:, sources, :positions]

    def _tables(self, rotation: Tensor) -> list[Tensor] | Tensor:
        """Return what queries and keys of each layer are multiplied with, from `rotation` [n, 2, D].

        Folded: one [n, 2, heads, D] per layer, norm weights included. Otherwise [n, 2, 1, D], the same for all layers.
        """
        if self._fold and self._norms is not None:
            return list((rotation[:, None, :, None] * self._norms).unbind(1))
        return rotation[:, :, None].to(self.dtype)

    def _normalise(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Root-mean-square norm over the last dimension; folded, without its weight and the root of its size."""
        size = x.shape[-1]
        if not self._fold:
            return F.rms_norm(x, (size,), weight, self._eps)
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._eps_terms[size])

    def _project(self, hidden: Tensor, index: int, table: Tensor) -> Tensor:
        """Return [n, (heads + 2 kv_heads) * D]: rotated queries and keys, and values, of hidden states [n, H]."""
        layout = self.layout
        qkv, bias, norm = self._layers[index][0], self._layers[index][1], self._layers[index][8]
        assert qkv is not None
        x = self._normalise(hidden, norm)
        x = x @ qkv if bias is None else torch.addmm(bias, x, qkv)
        heads, size = layout.num_heads + layout.num_kv_heads, layout.head_dim
        rotated = x[:, : heads * size].view(-1, heads, size)
        qk = rotated
        if self._qk_norm:
            qk = self._normalise(qk, None)
            if not self._fold:
                assert self._norms is not None
                qk = qk * self._norms[index, 0]
        cosines, sines = table.unbind(1)
        torch.addcmul(qk * cosines, qk.roll(size // 2, -1), sines, out=rotated)
        return x

    def _finish_block(self, hidden: Tensor, attended: Tensor, index: int) -> Tensor:
        """Return the block's output [n, H] from its input and what attention gave [n, heads * D]."""
        _, _, output, output_bias, gate_up, gate_up_bias, down, down_bias, _, norm = self._layers[index]
        assert output is not None and gate_up is not None and down is not None
        hidden = torch.addmm(hidden, attended, output)
        if output_bias is not None:
            hidden += output_bias
        x = self._normalise(hidden, norm)
        x = x @ gate_up if gate_up_bias is None else torch.addmm(gate_up_bias, x, gate_up)
        gate, up = x.chunk(2, -1)
        hidden = torch.addmm(hidden, F.silu(gate) * up, down)
        if down_bias is not None:
            hidden += down_bias
        return hidden

    def _logits(self, hidden: Tensor) -> Tensor:
        norm = None if self._fold else self._tensors["norm"]
        return (self._normalise(hidden, norm) @ self._head).float()

    def _require_weights(self) -> None:
        if not self._ready:
            raise RuntimeError("the decoder has no complete weights; load them and call finish_load first")

    @torch.inference_mode()
    def prefill(self, rows: Sequence[int], prompts: Sequence[Sequence[int]]) -> Tensor:
        """Run prompts into rows; see `milepost.recipe.Decoder`."""
        self._require_weights()
        layout = self.layout
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        count, longest = len(prompts), int(lengths.max())
        # Padding stands on the right, where the causal mask keeps it out of sight and decoding writes over it.
        ids = torch.zeros(count, longest, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.as_tensor(prompt)
        hidden = F.embedding(ids.to(self.device).view(-1), self._tensors["embed"])
        tables = self._tables(self._rotation[:longest].repeat(count, 1, 1))
        targets = torch.as_tensor(rows, device=self.device)
        query = layout.num_heads * layout.head_dim
        for index in range(layout.num_layers):
            x = self._project(hidden, index, tables[index] if isinstance(tables, list) else tables)
            x = x.view(count, longest, -1)
            self._cache[index, targets, :longest] = x[:, :, query:]
            heads = x.view(count, longest, -1, layout.head_dim).transpose(1, 2)
            q, k, v = torch.split(heads, [layout.num_heads, layout.num_kv_heads, layout.num_kv_heads], 1)
            grouped = layout.num_heads != layout.num_kv_heads
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
            hidden = self._finish_block(hidden, attended.transpose(1, 2).reshape(count * longest, query), index)
        last = torch.arange(count) * longest + lengths - 1
        return self._logits(hidden[last.to(self.device)])

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Advance the first rows by one token; see `milepost.recipe.Decoder`."""
        self._require_weights()
        layout, count = self.layout, len(tokens)
        shortest, longest = (int(extreme) for extreme in positions.aminmax())
        level = shortest == longest
        slots = (self._offsets[:count] + positions).to(self.device)
        positions = positions.to(self.device)
        span, bias = longest + 1, None
        if not level or self.device.type != "cpu":
            # GPU kernels want the mask's rows aligned; the extra entries are masked.
            span = span if self.device.type == "cpu" else min(-(-span // 8) * 8, self._cache.shape[2])
            bias = torch.zeros(count, 1, 1, span, dtype=self.dtype, device=self.device)
            bias.masked_fill_((torch.arange(span, device=self.device) > positions[:, None])[:, None, None], -torch.inf)
        hidden = F.embedding(tokens, self._tensors["embed"])
        tables = self._tables(self._rotation[longest:][:1] if level else self._rotation.index_select(0, positions))
        kv_heads, size, group = layout.num_kv_heads, layout.head_dim, layout.num_heads // layout.num_kv_heads
        query = layout.num_heads * size
        for index in range(layout.num_layers):
            x = self._project(hidden, index, tables[index] if isinstance(tables, list) else tables)
            self._flat[index].index_copy_(0, slots, x[:, query:])
            # Queries that share a key-value head stand where a sequence would, so no key is repeated.
            q = x[:, :query].view(count, kv_heads, group, size)
            k, v = self._keys_values[index, :, :count, :, :span].unbind(0)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
            hidden = self._finish_block(hidden, attended.reshape(count, query), index)
        return self._logits(hidden)
