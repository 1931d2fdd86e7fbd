"""The body of a dense Llama-like model on a CPU, its forward and backward pass written out over a padded batch.

Serves Qwen3, Qwen2, Llama and Mistral without sliding windows, over the parameters of the transformers model itself. On
small models a layer of the library costs more in single operations, modules and autograd nodes than in arithmetic. Here
a layer is one matrix product for query, key and value, one for gate and up, norms whose weight is folded into the
matrix behind them, and rotary embedding, norm and scale of queries and keys in one table; and all layers are one node.

With r = 1 / sqrt(mean(x^2) + eps) and y = r x, a norm before a matrix is (y * w) W^T = y (W * w)^T, so that with
F = W * w: dW = dF * w, dw = sum of dF * W over the rows, and dx = r (dy - y mean(dy * y)).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from milepost.recipe import HFModel
from milepost.rollout.local.rope import inverse_frequencies, rotation_table
from milepost.weights.layouts import dense_layout, has_qk_norm, projection_biases

WRITTEN_OUT = 256
"""Up to this length attention is two batched products and a softmax, beyond it the library's flash kernel."""

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class _Shape:
    """Numbers that every layer shares."""

    heads: int
    kv_heads: int
    head_dim: int
    epsilon: float
    qk_norm: bool
    qkv_bias: bool

    @property
    def query(self) -> int:
        return self.heads * self.head_dim

    @property
    def rotated(self) -> int:
        """Columns that are rotated: queries and keys."""
        return (self.heads + self.kv_heads) * self.head_dim


class _Tables(NamedTuple):
    """What queries and keys [B, L, heads, D] are multiplied with; the score's scale is in the queries' part."""

    cosines: Tensor
    """[L, heads, D], for what is multiplied as it is."""
    sines: Tensor
    """[L, heads, D], signed, for what is rolled by half a head."""
    hidden: Tensor | None
    """[group x L, L], minus infinity at later tokens; None beyond `WRITTEN_OUT`."""


class DenseBody:
    """Token ids [B, L] to hidden states [B, L, H], as the transformers body gives them, causal, positions from 0.

    Where a gradient is wanted it goes to the model's own parameters. Compute is in the parameters' dtype.

    Args:
        model: a transformers causal model that `serves` accepts the configuration of.
        config: its `config.json`.
    """

    def __init__(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        layout = dense_layout(config)
        self._shape = _Shape(
            layout.num_heads,
            layout.num_kv_heads,
            layout.head_dim,
            float(config.get("rms_norm_eps", 1e-6)),
            has_qk_norm(config),
            projection_biases(config)[0],
        )
        names = ["input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
        names += ["post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        names = [f"{name}.weight" for name in names]
        if self._shape.qk_norm:
            names += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        if self._shape.qkv_bias:
            names += [f"self_attn.{name}_proj.bias" for name in "qkv"]
        layers = [f"model.layers.{index}.{name}" for index in range(layout.num_layers) for name in names]
        self._parameters = [model.get_parameter(name) for name in (*layers, "model.norm.weight")]
        embedding = cast("nn.Embedding", model.get_submodule("model.embed_tokens"))
        # Of the padding token transformers takes no gradient.
        self._embedding, self._padding = embedding.weight, embedding.padding_idx
        self._frequencies = inverse_frequencies(config)
        self._tables: dict[int, _Tables] = {}

    @staticmethod
    def serves(config: Mapping[str, Any]) -> bool:
        """Whether a model with this `config.json` is computed exactly."""
        layer_types = set(config.get("layer_types") or ())
        windowed = config.get("use_sliding_window", config.get("model_type") == "mistral")
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        return (
            config.get("model_type") in {"qwen3", "qwen2", "llama", "mistral"}
            and config.get("hidden_act", "silu") == "silu"
            and not layer_types - {"full_attention"}
            and not (windowed and config.get("sliding_window"))
            and not any(projection_biases(config)[1:])
            and rope.get("rope_type", rope.get("type", "default")) in {"default", "linear", "llama3"}
            and rope.get("partial_rotary_factor", 1.0) == 1.0
        )

    def __call__(self, tokens: Tensor) -> Tensor:
        """Run a batch; see the class."""
        batch, length = tokens.shape
        tables = self._tables_for(length)
        hidden = F.embedding(tokens.reshape(-1), self._embedding, self._padding)
        keep = torch.is_grad_enabled()
        output: Tensor = _Body.apply(hidden, self._shape, tables, batch, keep, *self._parameters)  # type: ignore[no-untyped-call]
        return output.view(batch, length, -1)

    def _tables_for(self, length: int) -> _Tables:
        """Make the tables of a length, and keep those of the last few."""
        tables = self._tables.get(length)
        if tables is None:
            shape, like = self._shape, self._embedding
            scale = torch.ones(shape.heads + shape.kv_heads, 1)
            scale[: shape.heads] = shape.head_dim**-0.5
            rotation = rotation_table(self._frequencies, length)[:, :, None] * scale
            cosines, sines = (part.contiguous() for part in rotation.to(like.device, like.dtype).unbind(1))
            hidden = None
            if length <= WRITTEN_OUT:
                hidden = torch.full((length, length), -torch.inf, dtype=like.dtype, device=like.device).triu(1)
                hidden = hidden.repeat(shape.heads // shape.kv_heads, 1)
            if len(self._tables) >= 8:
                del self._tables[next(iter(self._tables))]
            tables = self._tables[length] = _Tables(cosines, sines, hidden)
        return tables


def add_batch_body(model: HFModel, config: Mapping[str, Any]) -> HFModel:
    """Give a model its `batch_body` where `DenseBody` serves its `config.json` and its weights are float32 at least.

    In 16 bits folding a norm into a matrix would round once more than the library does.
    """
    precise = all(parameter.dtype in (torch.float32, torch.float64) for parameter in model.body.parameters())
    return replace(model, batch_body=DenseBody(model.model, config)) if precise and DenseBody.serves(config) else model


class _Layer:
    """One layer: `forward` keeps what `backward` needs as attributes."""

    def __init__(self, parameters: tuple[Tensor, ...], shape: _Shape, tables: _Tables, batch: int) -> None:
        self.shape, self.tables, self.batch = shape, tables, batch
        self.norm, q, k, v, self.output, self.mlp_norm, gate, up, self.down, *rest = parameters
        self.qkv, self.gate_up = torch.cat([q, k, v]), torch.cat([gate, up])
        self.folded_qkv, self.folded_gate_up = self.qkv * self.norm, self.gate_up * self.mlp_norm
        self.weight: Tensor | None = None
        """[heads, D], the norm weights of queries and keys."""
        self.cosines, self.sines = tables.cosines, tables.sines
        if shape.qk_norm:
            q_norm, k_norm = rest[:2]
            self.weight = torch.cat([q_norm.expand(shape.heads, -1), k_norm.expand(shape.kv_heads, -1)])
            self.cosines = self.cosines * self.weight
            # The sines meet what is rolled by half a head, so their weights are rolled too.
            self.sines = self.sines * self.weight.roll(shape.head_dim // 2, -1)
        self.bias = torch.cat(rest[-3:]) if shape.qkv_bias else None

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, H] to [N, H]."""
        shape, batch = self.shape, self.batch
        self.y, self.r = _normed(hidden, shape.epsilon)
        x = F.linear(self.y, self.folded_qkv, self.bias)
        qk = x[:, : shape.rotated].view(batch, -1, shape.heads + shape.kv_heads, shape.head_dim)
        self.qk_y, self.qk_r = _normed(qk, shape.epsilon) if shape.qk_norm else (qk, qk)
        even, rolled = self.qk_y * self.cosines, self.qk_y.roll(shape.head_dim // 2, -1)
        length = qk.shape[1]
        query = x.new_empty(batch, shape.heads, length, shape.head_dim)
        key = x.new_empty(batch, shape.kv_heads, length, shape.head_dim)
        for first, heads in ((0, query), (shape.heads, key)):
            part = slice(first, first + heads.shape[1])
            torch.addcmul(even[:, :, part], rolled[:, :, part], self.sines[:, part], out=heads.transpose(1, 2))
        value = x[:, shape.rotated :].view(batch, length, shape.kv_heads, -1).transpose(1, 2).contiguous()
        attended = self._attend(query, key, value)
        self.attended = attended.transpose(1, 2).reshape(-1, shape.query)
        middle = torch.addmm(hidden, self.attended, self.output.t())
        self.mlp_y, self.mlp_r = _normed(middle, shape.epsilon)
        gate, up = F.linear(self.mlp_y, self.folded_gate_up).chunk(2, -1)
        self.gate, self.up, self.gated = gate, up, F.silu(gate)
        self.product = self.gated * up
        return torch.addmm(middle, self.product, self.down.t())

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, heads, L, D] from queries and [B, kv_heads, L, D] keys and values; queries are scaled already."""
        hidden = self.tables.hidden
        self.query, self.key, self.value = query, key, value
        if hidden is None:
            with torch.enable_grad():
                q, k, v = self.inputs = [part.detach().requires_grad_() for part in (query, key, value)]
                self.attention = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
            return self.attention.detach()
        # Queries that share a key stand one after the other, so no key is repeated.
        scores = torch.baddbmm(hidden, self._grouped(query), self._grouped(key).transpose(1, 2))
        self.weights = scores.softmax(-1)
        return torch.bmm(self.weights, self._grouped(value)).view_as(query)

    def _grouped(self, x: Tensor) -> Tensor:
        """[B, heads or kv_heads, L, D] as [B x kv_heads, (group x) L, D]."""
        return x.view(self.batch * self.shape.kv_heads, -1, self.shape.head_dim)

    def _attend_backward(self, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values from that of the output [B, heads, L, D]."""
        if self.tables.hidden is None:
            query, key, value = torch.autograd.grad(self.attention, self.inputs, grad)
            return query, key, value
        grad, weights = self._grouped(grad), self.weights
        grad_value = torch.bmm(weights.transpose(1, 2), grad)
        grad_weights = torch.bmm(grad, self._grouped(self.value).transpose(1, 2))
        grad_scores = _aten._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_query = torch.bmm(grad_scores, self._grouped(self.key))
        grad_key = torch.bmm(grad_scores.transpose(1, 2), self._grouped(self.query))
        return grad_query.view_as(self.query), grad_key.view_as(self.key), grad_value.view_as(self.value)

    def backward(self, grad: Tensor) -> tuple[Tensor, list[Tensor]]:
        """From the gradient of the output [N, H] to that of the input, and of the parameters in their order."""
        shape, batch = self.shape, self.batch
        grad_down = grad.t() @ self.product
        grad_product = grad @ self.down
        # Written into its halves: putting them side by side afterwards would cost as much as making them.
        grad_gate_up = grad.new_empty(len(grad), 2 * self.up.shape[1])
        of_gate, of_up = grad_gate_up.chunk(2, -1)
        torch.mul(grad_product, self.gated, out=of_up)
        _aten.silu_backward(grad_product.mul_(self.up), self.gate, grad_input=of_gate)
        grad_folded, grad_y = grad_gate_up.t() @ self.mlp_y, grad_gate_up @ self.folded_gate_up
        grad_gate, grad_up = (grad_folded * self.mlp_norm).chunk(2)
        grad_mlp_norm = (grad_folded * self.gate_up).sum(0)
        grad = grad + _normed_backward(grad_y, self.mlp_y, self.mlp_r)

        grad_output = grad.t() @ self.attended
        grad_attended = (grad @ self.output).view(batch, -1, shape.heads, shape.head_dim)
        query, key, value = self._attend_backward(grad_attended.transpose(1, 2).contiguous())
        rotated = query.new_empty(batch, query.shape[2], shape.heads + shape.kv_heads, shape.head_dim)
        rotated[:, :, : shape.heads] = query.transpose(1, 2)
        rotated[:, :, shape.heads :] = key.transpose(1, 2)
        # The roll by half a head is its own inverse.
        turned = (rotated * self.tables.sines).roll(shape.head_dim // 2, -1)
        rotated = turned.addcmul_(rotated, self.tables.cosines)
        rest: list[Tensor] = []
        if self.weight is not None:
            of_weight = (rotated * self.qk_y).flatten(0, 1).sum(0)
            rest += [of_weight[: shape.heads].sum(0), of_weight[shape.heads :].sum(0)]
            rotated = _normed_backward(rotated.mul_(self.weight), self.qk_y, self.qk_r)
        sizes = [shape.query, shape.rotated - shape.query, shape.rotated - shape.query]
        grad_x = grad.new_empty(len(grad), len(self.qkv))
        grad_x[:, : shape.rotated] = rotated.view(len(grad), -1)
        grad_x[:, shape.rotated :].view_as(value.transpose(1, 2)).copy_(value.transpose(1, 2))
        if self.bias is not None:
            rest += torch.split(grad_x.sum(0), sizes)
        grad_folded, grad_y = grad_x.t() @ self.y, grad_x @ self.folded_qkv
        grad_q, grad_k, grad_v = torch.split(grad_folded * self.norm, sizes)
        grad_norm = (grad_folded * self.qkv).sum(0)
        grad = grad + _normed_backward(grad_y, self.y, self.r)
        matrices = [grad_q, grad_k, grad_v, grad_output, grad_mlp_norm, grad_gate, grad_up, grad_down]
        return grad, [grad_norm, *matrices, *rest]


def _normed(x: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return y = r x and r [..., 1] = 1 / sqrt(mean(x^2) + epsilon) over the last dimension."""
    r = torch.linalg.vecdot(x, x).div_(x.shape[-1]).add_(epsilon).rsqrt_().unsqueeze(-1)
    return x * r, r


def _normed_backward(grad: Tensor, y: Tensor, r: Tensor) -> Tensor:
    """Turn the gradient of y into that of x, in place: r (grad - y mean(grad y))."""
    mean = torch.linalg.vecdot(grad, y).div_(y.shape[-1]).unsqueeze(-1)
    return grad.addcmul_(y, mean, value=-1).mul_(r)


class _Body(torch.autograd.Function):
    """All layers and the final norm as one node."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, shape: _Shape, tables: _Tables, batch: int, keep: bool, *parameters: Tensor
    ) -> Tensor:
        *of_layers, norm = parameters
        per_layer = 9 + 2 * shape.qk_norm + 3 * shape.qkv_bias
        layers = []
        for first in range(0, len(of_layers), per_layer):
            layer = _Layer(tuple(of_layers[first : first + per_layer]), shape, tables, batch)
            hidden = layer.forward(hidden)
            if keep:
                layers.append(layer)
        y, r = _normed(hidden, shape.epsilon)
        if keep:
            ctx.layers = layers
            ctx.save_for_backward(y, r, norm)
        return y * norm

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        y, r, norm = ctx.saved_tensors
        grad_norm = (grad * y).sum(0)
        grad = _normed_backward(grad * norm, y, r)
        parameters: list[list[Tensor]] = []
        for layer in reversed(cast("list[_Layer]", ctx.layers)):
            grad, of_layer = layer.backward(grad)
            parameters.append(of_layer)
        # Intermediate results are as large as the model's own; none outlives the backward pass.
        ctx.layers = []
        flat = [gradient for of_layer in reversed(parameters) for gradient in of_layer]
        return grad, None, None, None, None, *flat, grad_norm
