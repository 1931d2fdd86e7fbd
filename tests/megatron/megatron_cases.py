"""What the tests of the Megatron trainer share: a tiny checkpoint, a ragged batch, a plan, and plain references."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from milepost.components import AlgorithmTraits, Component, ModelLayout, NoOptions
from milepost.config.plan import Choice, Plan
from milepost.config.schema import RunConfig
from milepost.functional.aggregation import token_weights
from milepost.training.inputs import Metric, PolicyInputs, TokenLoss
from milepost.training.schedule import Schedule, make_schedule
from milepost.training.trainer import Batch
from torch import Tensor

VOCAB = 61
LENGTHS = [7, 12, 5, 9, 12, 3, 10, 8, 17, 6, 4, 11, 9, 2, 13, 8]
TEMPERATURE = 0.8
CPU = torch.device("cpu")
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "norm_topk_prob": True,
    "num_hidden_layers": 2,
    "pad_token_id": None,
}
"""What makes a tiny `qwen3_moe` checkpoint of two layers with four experts."""


class Clip:
    """The PPO clip, written out."""

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        ratio = (inputs.log_probs - inputs.old_log_probs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        values = -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
        return TokenLoss(values, {"ratio": Metric(ratio.detach(), "max")})


class Sequence:
    """GSPO: one ratio for a whole sample, wherever its tokens lie."""

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        ratio = inputs.sample_mean(inputs.log_probs - inputs.old_log_probs).exp()
        clipped = ratio.clamp(0.7, 1.4)
        values = -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
        sample = inputs.index.per_sample(torch.ones_like(ratio))
        return TokenLoss(values, {"tokens": Metric(sample, "mean", per="sample")})


ALGORITHMS = {"clip": Clip, "sequence": Sequence}


def make_checkpoint(path: Path, architecture: str = "qwen3", tied: bool = False, **changes: Any) -> Path:
    """Write a tiny checkpoint whose weights, norms and biases included, all matter."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    kinds: dict[str, Any] = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }
    config_class, model_class = kinds[architecture]
    torch.manual_seed(0)
    config = config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 64,
            "tie_word_embeddings": tied,
            **changes,
        }
    )
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(path)
    return path


def make_plan(path: Path, *, critic: bool = False, world: int = 1, **sections: Mapping[str, Any]) -> Plan:
    given: dict[str, Any] = {
        "model": {"path": str(path)},
        "data": {"path": "none.jsonl"},
        "reward": {"name": "none"},
        "rollout": {"temperature": TEMPERATURE},
        "optimizer": {"name": "sgd", "lr": 1e-2, "clip_grad": 0.0, "weight_decay": 0.0},
    }
    for name, section in sections.items():
        given[name] = given.get(name, {}) | dict(section)
    component: Component[Any] = Component("none", NoOptions, AlgorithmTraits(), lambda _: None, "Nothing.")
    choice = Choice(component, NoOptions(), "none")
    config = RunConfig.model_validate(given)
    trainer = config.trainer
    return Plan(
        config=config,
        origins={},
        run_dir=path,
        base_dir=path,
        algorithm=choice,
        advantage=choice,
        reward=choice,
        model=choice,
        transport=choice,
        layout=ModelLayout(4, 32, 4, 2, 8, VOCAB, 0, True, 64),
        model_path=path,
        num_rollouts=4,
        batch_size=8,
        samples_per_prompt=2,
        global_batch_size=16,
        steps_per_rollout=1,
        world_size=world,
        data_parallel=world // (trainer.tensor_parallel * trainer.pipeline_parallel * trainer.context_parallel),
        needs_critic=critic,
        needs_reference=False,
        needs_teacher=False,
    )


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    total, count = sum(LENGTHS), len(LENGTHS)
    lengths = torch.tensor(LENGTHS)
    starts = lengths.cumsum(0) - lengths
    mask = torch.rand(total, generator=generator) < 0.7
    mask[starts] = False
    mask[starts[5] : starts[5] + LENGTHS[5]] = False  # a sample without a trainable token
    columns = {
        "tokens": torch.randint(0, VOCAB, (total,), generator=generator).to(torch.int32),
        "mask": mask,
        "advantages": torch.randn(total, generator=generator),
        "ref_log_probs": -torch.rand(total, generator=generator) * 4,
        "values": torch.randn(total, generator=generator),
        "returns": torch.randn(total, generator=generator),
        "weights": token_weights(mask, lengths, torch.arange(count), aggregation="sample_mean"),
    }
    return Batch(lengths, columns)


def make_tiny_schedule(data_parallel: int, budget: int, interleave: int = 1) -> Schedule:
    return make_schedule(
        LENGTHS,
        range(len(LENGTHS)),
        data_parallel=data_parallel,
        global_batch_size=len(LENGTHS),
        steps_per_rollout=1,
        token_budget=budget,
        interleave=interleave,
    )


def plain_columns(model: Any, batch: Batch, value_head: tuple[Tensor, Tensor] | None = None) -> dict[str, Tensor]:
    """Log-probs [N] and entropy [N] of transformers' own forward, sample by sample; values [N] of a value head."""
    columns: dict[str, list[Tensor]] = {"log_probs": [], "entropy": [], "values": []}
    for index, length in enumerate(batch.lengths.tolist()):
        start = int(batch.offsets[index])
        tokens = batch["tokens"][start : start + length].long()
        output = model(input_ids=tokens.unsqueeze(0), output_hidden_states=True)
        nothing = torch.zeros(1)
        if value_head is not None:
            values = output.hidden_states[-1][0] @ value_head[0].t() + value_head[1]
            columns["values"].append(torch.cat([nothing, values[:-1, 0]]))
            continue
        log_softmax = (output.logits[0] / TEMPERATURE).log_softmax(-1)
        picked = log_softmax[:-1].gather(1, tokens[1:].unsqueeze(1)).squeeze(1)
        columns["log_probs"].append(torch.cat([nothing, picked]))
        columns["entropy"].append(torch.cat([nothing, -(log_softmax.exp() * log_softmax).sum(-1)[:-1]]))
    return {name: torch.cat(parts) for name, parts in columns.items() if parts}


def plain_policy_loss(kind: str, log_probs: Tensor, batch: Batch) -> Tensor:
    """The clip of one token, or of one sample's mean, with the batch's weights."""
    mask, old = batch["mask"], batch["old_log_probs"]
    difference = log_probs - old
    if kind == "sequence":
        parts = []
        for index in range(batch.num_samples):
            span = slice(int(batch.offsets[index]), int(batch.offsets[index + 1]))
            kept = difference[span][mask[span]]
            parts.append((kept.sum() / max(len(kept), 1)).expand(int(batch.lengths[index])))
        difference = torch.cat(parts)
    ratio = difference.exp()
    low, high = (0.7, 1.4) if kind == "sequence" else (0.8, 1.2)
    loss = -torch.minimum(ratio * batch["advantages"], ratio.clamp(low, high) * batch["advantages"])
    return (batch["weights"] * loss)[mask].sum()
