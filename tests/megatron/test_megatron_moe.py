"""Experts on every layout against transformers and torch, and what the recipe reads of `config.json` and refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import (
    CPU,
    EXPERTS,
    Clip,
    make_batch,
    make_checkpoint,
    make_plan,
    make_tiny_schedule,
    plain_columns,
    plain_policy_loss,
)
from megatron_world import run_world
from milepost.weights.source import ModuleSource
from safetensors.torch import load_file

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "single_recompute": (1, {"recompute": "selective"}),
    "ep2": (2, {"expert_parallel": 2}),
    "ep2_cp2": (2, {"expert_parallel": 2, "context_parallel": 2}),
    "ep2_tp2": (2, {"expert_parallel": 2, "tensor_parallel": 2, "sequence_parallel": True}),
}
CASES: dict[int, list[tuple[str, int]]] = {
    # Ranks, and what they run one after the other: layouts with tokens per micro-batch.
    1: [("single", 38), ("single", 1000), ("single_recompute", 38)],
    2: [("ep2", 38), ("ep2", 1000), ("ep2_cp2", 38), ("ep2_tp2", 38)],
}
LR = 0.05


def make_trainer(path: Path, layout: str, optimizer: dict[str, Any]) -> Any:
    from milepost.training.megatron import parallel
    from milepost.training.megatron.trainer import MegatronTrainer
    from milepost_qwen3_moe.recipe import Qwen3MoeRecipe

    parallel.destroy()
    world, section = LAYOUTS[layout]
    plan = make_plan(path, world=world, trainer=section, optimizer=optimizer)
    return MegatronTrainer(plan, recipe=Qwen3MoeRecipe(), algorithm=Clip(), device=CPU, dtype=torch.float32)


def make_step(layout: str, budget: int) -> Any:
    world, section = LAYOUTS[layout]
    pipeline, context = section.get("pipeline_parallel", 1), section.get("context_parallel", 1)
    data = world // pipeline // context // section.get("tensor_parallel", 1)
    return make_tiny_schedule(data, budget, pipeline).steps[0]


def two_steps(rank: int, path: str, cases: list[tuple[str, int]]) -> list[dict[str, Any]]:
    from milepost.training.megatron.source import MegatronSource

    results = []
    batch = make_batch()
    batch["old_log_probs"] = torch.load(Path(path) / "old.pt")
    for layout, budget in cases:
        trainer = make_trainer(Path(path), layout, {"lr": LR})
        start = {name: tensor.clone() for name, tensor in trainer.source("actor").tensors()}
        held = {shard.name for shard in trainer.source("actor").shards()}
        step = make_step(layout, budget)
        first = trainer.step("actor", step, batch)
        pieces, description = trainer._trained["actor"].pieces, trainer._describe(Path(path))
        source = MegatronSource(pieces, description, torch.float32, lambda p: p.main_grad.clone())
        gradients = dict(source.tensors())
        second = trainer.step("actor", step, batch)
        found = {"first": dict(first.metrics), "second": dict(second.metrics), "held": held}
        found["micro_batches"] = len(step.ranks[0])
        if rank == 0:
            weights = {name: tensor.clone() for name, tensor in trainer.source("actor").tensors()}
            tensors = {"start": start, "gradients": gradients, "weights": weights}
            torch.save(tensors, Path(path) / f"{layout}-{budget}.pt")
        else:
            list(trainer.source("actor").tensors())
        results.append(found)
    return results


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path_factory.mktemp("moe") / "model", "qwen3_moe", **EXPERTS)
    batch = make_batch()
    noise = 0.3 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        columns = plain_columns(AutoModelForCausalLM.from_pretrained(path), batch)
        torch.save(columns["log_probs"] + noise, path / "old.pt")
    return path


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> dict[str, Any]:
    """The two steps by transformers, one sample at a time, and torch's SGD; by the names that checkpoints have."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    batch = make_batch()
    batch["old_log_probs"] = torch.load(checkpoint / "old.pt")
    update = torch.optim.SGD(model.parameters(), lr=LR)
    found: dict[str, Any] = {}
    for name in ("first", "second"):
        loss = plain_policy_loss("clip", plain_columns(model, batch)["log_probs"], batch)
        update.zero_grad()
        loss.backward()
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()]))
        if name == "first":
            # What came as one tensor per expert is one in the model: its gradients go through the same conversion.
            kept = {key: p.detach().clone() for key, p in model.named_parameters()}
            with torch.no_grad():
                for p in model.parameters():
                    p.copy_(p.grad)
            found["gradients"] = {key: value.clone() for key, value in ModuleSource(model).tensors()}
            with torch.no_grad():
                for key, p in model.named_parameters():
                    p.copy_(kept[key])
        update.step()
        found[name] = {"loss": float(loss.detach()), "grad_norm": float(norm)}
    found["weights"] = {key: value.clone() for key, value in ModuleSource(model).tensors()}
    return found


@pytest.mark.parametrize("world", CASES)
def test_two_steps_equal_transformers_and_torch(checkpoint: Path, reference: dict[str, Any], world: int) -> None:
    cases = CASES[world]
    ranks = run_world(two_steps, world, str(checkpoint), cases)
    saved = load_file(checkpoint / "model.safetensors")
    assert {name for name in saved if ".experts." in name} == {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}_proj.weight"
        for layer in range(2)
        for expert in range(4)
        for kind in ("gate", "up", "down")
    }
    for index, (layout, budget) in enumerate(cases):
        results = [rank[index] for rank in ranks]
        result = results[0] | torch.load(checkpoint / f"{layout}-{budget}.pt")
        for name in ("first", "second"):
            assert all(other[name] == result[name] for other in results), "metrics differ between ranks"
            assert result[name]["loss"] == pytest.approx(reference[name]["loss"], abs=2e-5)
            assert result[name]["grad_norm"] == pytest.approx(reference[name]["grad_norm"], rel=5e-5)
        assert (result["micro_batches"] == 1) == (budget == 1000)
        assert result["start"].keys() == saved.keys()
        assert all(torch.equal(result["start"][name], saved[name]) for name in saved), layout
        assert result["gradients"].keys() == reference["gradients"].keys()
        for name, gradient in result["gradients"].items():
            expected = reference["gradients"][name]
            assert (gradient - expected).norm() < 1e-4 * expected.norm(), f"{layout}: gradient of {name}"
        for name, weight in result["weights"].items():
            torch.testing.assert_close(weight, reference["weights"][name], atol=2e-6, rtol=1e-5)
        if layout.startswith("ep2"):
            experts = [{name for name in r["held"] if ".experts." in name} for r in results]
            assert all(len(held) == len(saved_experts(saved)) // 2 for held in experts), layout


def saved_experts(saved: dict[str, Any]) -> list[str]:
    return [name for name in saved if ".experts." in name]
