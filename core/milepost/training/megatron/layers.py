"""The parts of a layer that Megatron-core has only with Transformer Engine: packed attention, rotation, RMS norm.

The rest of a layer is Megatron's own. Rows are given to Megatron as [T, 1, H], one batch of one sequence; who sees whom
is in the `RowParams` that it hands through to every layer's attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from milepost.training.attention import packed_attention, ragged_attention
from milepost.training.kernels import KERNELS, fused, rms_norm_fused
from milepost.training.megatron.parallel import gather_rows
from milepost.training.megatron.rows import Attendance


@dataclass
class RowParams(PackedSeqParams):  # type: ignore[misc]
    """What Megatron hands to every layer about a row."""

    attendance: Attendance | None = None
    rotation: Rotation | None = None


class PackedAttention(MegatronModule):  # type: ignore[misc]
    """Causal attention within each sample of a row, under context parallelism too; it rotates queries and keys first.

    Megatron's own rotary embedding would retype some numbers of a `config.json`, make cosines and sines anew in every
    layer, and rotate in eight passes over memory.

    Under context parallelism keys and values are gathered over the ranks, and each of the two chunks of a sample
    attends to what comes before it. On a GPU in 16-bit precision `torch.nn.attention.varlen` does the work, elsewhere
    `scaled_dot_product_attention`.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config)
        self.scale = softmax_scale
        groups = parallel_state.get_context_parallel_group() if pg_collection is None else pg_collection.cp
        self.context_group = groups

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: RowParams | None = None,
    ) -> Tensor:
        """Attend: query [T, 1, Hq, D], key and value [T, 1, Hk, D] to [T, 1, Hq x D].

        Raises ValueError if the row does not come with its attendance and rotation, or a mask or bias does.
        """
        attendance = None if packed_seq_params is None else packed_seq_params.attendance
        rotation = None if packed_seq_params is None else packed_seq_params.rotation
        if attendance is None or rotation is None or attention_mask is not None or attention_bias is not None:
            raise ValueError("a row comes with RowParams(attendance=..., rotation=...) and without mask or bias")
        turn = rotate_fused if query.is_cuda else rotate
        query, key = (turn(x, rotation.cosines, rotation.sines) for x in (query, key))
        query, key, value = query.squeeze(1), key.squeeze(1), value.squeeze(1)
        if attendance.halves is None:
            q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
            out = packed_attention(self, q, k, v, None, self.scale, packing=attendance.layout)[0][0]
        else:
            key, value = gather_rows(torch.stack([key, value], 1), self.context_group).unbind(1)
            out = torch.empty_like(query)
            for half in attendance.halves:
                part = ragged_attention(
                    query.index_select(0, half.queries),
                    key.index_select(0, half.keys),
                    value.index_select(0, half.keys),
                    half.query_lengths,
                    half.key_lengths,
                    scaling=self.scale,
                )
                out = out.index_copy(0, half.queries, part)
        return out.reshape(out.shape[0], 1, -1)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Nothing to save."""
        return {}


class RMSNorm(nn.Module):
    """x / rms(x) x weight, over the last dimension; its gradient is summed under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(
            torch.ones(
                hidden_size, dtype=config.params_dtype, device="cpu" if config.use_cpu_initialization else "cuda"
            )
        )
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise."""
        if x.is_cuda and KERNELS.norms:
            return rms_norm_fused(x.reshape(-1, x.shape[-1]), self.weight, self.eps).view(x.shape)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of a row's angles, each [T, 1, 1, D] float32."""

    cosines: Tensor
    sines: Tensor

    @classmethod
    def of(cls, positions: Tensor, inverse_frequencies: Tensor) -> Rotation:
        """Make them of positions [T] and inverse frequencies [D / 2] float32."""
        angles = positions.float().unsqueeze(1) * inverse_frequencies
        angles = torch.cat([angles, angles], 1)[:, None, None]
        return cls(angles.cos(), angles.sin())


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate x [T, 1, heads, D], its halves being the two coordinates (arXiv 2104.09864), in float32 at least."""
    wide = x.to(torch.promote_types(torch.float32, x.dtype))
    first, second = wide.chunk(2, -1)
    return (wide * cosines + torch.cat([-second, first], -1) * sines).to(x.dtype)


rotate_fused = fused(rotate)
"""One kernel in place of eight."""


def layer_spec(config: Any) -> ModuleSpec:
    """Return Megatron's local layer with packed attention and this module's norms."""
    if config.num_moe_experts is not None and not hasattr(moe_utils, "te_general_gemm"):
        # The router asks for this name, which Megatron defines only where Transformer Engine is.
        moe_utils.te_general_gemm = None
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm, normalization="RMSNorm"
    )
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
    attention = layer.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    # Megatron would rename the norms as Transformer Engine has them, fused into the matrices behind them.
    layer.sharded_state_dict_keys_map = {}
    return spec
