"""The Megatron half of the `qwen3_moe` recipe: Qwen3 whose feed-forwards are experts behind a router.

Without Transformer Engine's grouped products each expert is a feed-forward of its own (Megatron's `SequentialMLP`). No
token is ever dropped: experts have no capacity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from milepost.recipe import MegatronModel
from milepost.weights.conversion import Conversion, Part
from milepost.weights.dense import DenseMegatron
from milepost.weights.layouts import integer

from milepost_qwen3_moe.layout import check_sparse, experts_per_token, num_experts

MOE_KEYS = frozenset(
    {
        *("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        *("decoder_sparse_step", "mlp_only_layers", "router_aux_loss_coef", "output_router_logits"),
        *("experts_implementation", "router_jitter_noise"),
    }
)
"""Keys that say what the experts do, or, the last two, how transformers runs them; all others mean what Qwen3's do."""


class Qwen3MoeMegatron:
    """Implements `milepost.recipe.MegatronHalf`."""

    def describe(self, config: Mapping[str, Any]) -> MegatronModel:
        """Read a `config.json`. Raises ValueError naming a value that is missing, malformed or not understood."""
        if config.get("model_type") != "qwen3_moe":
            raise ValueError(f"config.json has model_type = {config.get('model_type')!r}, expected 'qwen3_moe'")
        check_sparse(config)
        if config.get("router_jitter_noise"):
            raise ValueError(f"config.json has router_jitter_noise = {config['router_jitter_noise']!r}, expected 0")
        if config.get("output_router_logits") and config.get("router_aux_loss_coef", 0.001):
            raise ValueError(
                "config.json has output_router_logits = true, which asks for an auxiliary loss of the router; "
                "the Megatron trainer has none, set it to false"
            )
        experts, visited = num_experts(config), experts_per_token(config)
        normalised = bool(config.get("norm_topk_prob", False))
        if visited == 1 and normalised:
            raise ValueError(
                "config.json has num_experts_per_tok = 1 and norm_topk_prob = true, by which no gradient reaches the "
                "router; expected norm_topk_prob false"
            )
        hidden, inner = integer(config, "hidden_size"), integer(config, "moe_intermediate_size")
        plain = {key: value for key, value in config.items() if key not in MOE_KEYS}
        qwen3 = DenseMegatron("qwen3").describe({**plain, "model_type": "qwen3", "intermediate_size": inner})
        return replace(
            qwen3,
            transformer={
                **qwen3.transformer,
                "num_moe_experts": experts,
                "moe_ffn_hidden_size": inner,
                "moe_router_topk": visited,
                # The softmax of the chosen logits is that of all logits, made to sum to 1 over the chosen.
                "moe_router_pre_softmax": not normalised,
                "moe_router_dtype": "fp32",
                "moe_router_load_balancing_type": "none",
                "moe_aux_loss_coeff": 0.0,
                "moe_expert_capacity_factor": None,
            },
            conversions=_conversions(qwen3.conversions, experts, hidden, inner),
        )


def _conversions(dense: tuple[Conversion, ...], experts: int, hidden: int, inner: int) -> tuple[Conversion, ...]:
    """Return Qwen3's rules with those of a router and experts in place of those of the feed-forward."""
    target, source = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."
    mixture = [Conversion(f"{target}router.weight", (Part(f"{source}gate.weight", (experts, hidden)),))]
    for expert in range(experts):
        ours, theirs = f"{target}experts.local_experts.{expert}.", f"{source}experts.{expert}."
        gate_up = tuple(Part(f"{theirs}{name}_proj.weight", (inner, hidden)) for name in ("gate", "up"))
        down = (Part(f"{theirs}down_proj.weight", (hidden, inner)),)
        mixture.append(Conversion(f"{ours}linear_fc1.weight", gate_up, expert=expert))
        mixture.append(Conversion(f"{ours}linear_fc2.weight", down, expert=expert))
    first = next(index for index, rule in enumerate(dense) if rule.megatron.startswith(target))
    rest = [rule for rule in dense[first:] if not rule.megatron.startswith(target)]
    return (*dense[:first], *mixture, *rest)
