"""Gradients that matrix products add into Megatron's buffers are those that autograd would have made."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from megatron_cases import CPU, Clip, make_batch, make_checkpoint, make_plan, make_tiny_schedule
from megatron_world import run_world


def gradients(path: str, section: dict[str, object]) -> dict[str, torch.Tensor]:
    from milepost.training.megatron.trainer import MegatronTrainer
    from milepost_qwen3.recipe import Qwen3Recipe

    plan = make_plan(Path(path), world=2, trainer=section)
    trainer = MegatronTrainer(plan, recipe=Qwen3Recipe(), algorithm=Clip(), device=CPU, dtype=torch.float32)
    batch = make_batch()
    batch["old_log_probs"] = -torch.ones(batch.num_tokens) * 4
    step = make_tiny_schedule(plan.data_parallel, 38).steps[0]
    assert len(step.ranks[0]) >= 2
    trainer.step("actor", step, batch)
    return {name: p.main_grad for piece in trainer._trained["actor"].pieces for name, p in piece.named_parameters()}


def compare(rank: int, path: str, section: dict[str, object]) -> dict[str, float]:
    """By tensor, how far the gradients of the two ways are apart, relative to the tensor's own."""
    from megatron.core.tensor_parallel import layers
    from milepost.training.megatron import accumulation, model

    want = gradients(path, section)
    calls = []
    accumulation.provide()
    add = layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32
    layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32 = lambda *args: (calls.append(1), add(*args))
    model.accumulates_in_products = lambda device: True
    found = gradients(path, section)
    # Four matrices in each of four layers, in every micro-batch.
    assert len(calls) % 16 == 0 and len(calls) > 16
    # Padding of the vocabulary has no gradient.
    return {name: float((found[name] - want[name]).norm() / (want[name].norm() + 1e-9)) for name in want}


@pytest.mark.parametrize("section", [{"tensor_parallel": 2, "sequence_parallel": True}, {"recompute": "full"}])
def test_gradients_are_equal(tmp_path: Path, section: dict[str, object]) -> None:
    path = make_checkpoint(tmp_path / "model", tied=True)
    for apart in run_world(compare, 2, str(path), section):
        assert max(apart.values()) < 1e-6
