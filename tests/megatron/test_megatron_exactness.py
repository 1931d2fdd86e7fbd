"""The Megatron trainer on every layout against transformers and torch: losses, gradients, weights after two steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_cases import (
    ALGORITHMS,
    CPU,
    make_batch,
    make_checkpoint,
    make_plan,
    make_tiny_schedule,
    plain_columns,
    plain_policy_loss,
)
from megatron_world import run_world

LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {
    # name: world, trainer section, tied
    "single": (1, {}, False),
    "single_tied_recompute": (1, {"recompute": "full"}, True),
    "single_selective": (1, {"recompute": "selective"}, False),
    "tp2": (2, {"tensor_parallel": 2}, True),
    "tp2_sp": (2, {"tensor_parallel": 2, "sequence_parallel": True}, False),
    "pp2_tied": (2, {"pipeline_parallel": 2}, True),
    "pp2_vpp2": (2, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}, False),
    "cp2": (2, {"context_parallel": 2}, False),
    "dp2": (2, {}, False),
    "tp2_sp_cp2": (4, {"tensor_parallel": 2, "context_parallel": 2, "sequence_parallel": True}, False),
    "pp2_cp2": (4, {"pipeline_parallel": 2, "context_parallel": 2}, True),
    "pp2_dp2": (4, {"pipeline_parallel": 2}, False),
}
LR = 0.05


def train(rank: int, folder: str, layout: str, kind: str, budget: int, optimizer: dict[str, Any]) -> dict[str, Any]:
    """Two steps; rank 0 leaves the gradients of the first and the weights after both in the folder."""
    from milepost.training.megatron.source import MegatronSource
    from milepost.training.megatron.trainer import MegatronTrainer
    from milepost_qwen3.recipe import Qwen3Recipe

    world, section, tied = LAYOUTS[layout]
    path = Path(folder) / ("tied" if tied else "untied")
    critic = kind == "value"
    plan = make_plan(path, world=world, trainer=section, optimizer={"lr": LR, **optimizer}, critic=critic)
    algorithm = ALGORITHMS["clip" if critic else kind]()
    trainer = MegatronTrainer(plan, recipe=Qwen3Recipe(), algorithm=algorithm, device=CPU, dtype=torch.float32)
    role = "critic" if critic else "actor"
    batch = make_batch()
    batch["old_log_probs"] = torch.load(path / "old.pt")
    schedule = make_tiny_schedule(plan.data_parallel, budget, plan.config.trainer.pipeline_parallel)
    step = schedule.steps[0]
    count = len(step.ranks[0])
    first = trainer.step(role, step, batch)
    trained = trainer._trained[role]
    description = trainer._describe(path)
    if plan.config.optimizer.name == "sgd":
        gradients = dict(
            MegatronSource(trained.pieces, description, torch.float32, lambda p: p.main_grad.clone()).tensors()
        )
    else:
        gradients = {}
    second = trainer.step(role, step, batch)
    weights = dict(trainer.source(role).tensors())
    # What the pipeline stages would send each by itself is that, every tensor once.
    staged = {name: tensor.clone() for name, tensor in trainer.source(role).stage_tensors()}
    assert all(torch.equal(tensor, weights[name]) for name, tensor in staged.items())
    stages: list[tuple[str, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(stages, tuple(staged))
    assert sorted(name for stage in set(stages) for name in stage) == sorted(weights)
    if rank == 0:
        torch.save({"gradients": gradients, "weights": weights}, Path(folder) / f"{layout}-{kind}-{count}.pt")
    return {"first": dict(first.metrics), "second": dict(second.metrics), "micro_batches": count}


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("megatron")
    batch = make_batch()
    noise = 0.3 * torch.randn(batch.num_tokens, generator=torch.Generator().manual_seed(9))
    for name, tied in (("tied", True), ("untied", False)):
        path = make_checkpoint(folder / name, tied=tied)
        model = AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            torch.save(plain_columns(model, batch)["log_probs"] + noise, path / "old.pt")
    return folder


def reference(path: Path, kind: str, optimizer: dict[str, Any]) -> dict[str, Any]:
    """The same two steps by transformers, one sample at a time, and torch's optimizers."""
    from milepost.config.schema import RunSection
    from milepost.training.policy import ValueHead
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    batch = make_batch()
    batch["old_log_probs"] = torch.load(path / "old.pt")
    parameters = dict(model.named_parameters())
    head = None
    if kind == "value":
        start = ValueHead(32, seed=RunSection().seed, dtype=torch.float32, device=CPU)
        parameters.pop("lm_head.weight", None)
        parameters |= {"value_head.weight": start.weight, "value_head.bias": start.bias}
        head = (start.weight, start.bias)
    if optimizer.get("name") == "adam":
        decay = [p for p in parameters.values() if p.dim() > 1]
        rest = [p for p in parameters.values() if p.dim() < 2]
        update: torch.optim.Optimizer = torch.optim.AdamW(
            [{"params": decay, "weight_decay": optimizer["weight_decay"]}, {"params": rest, "weight_decay": 0.0}],
            lr=LR,
            betas=(0.9, 0.98),
            eps=optimizer["eps"],
        )
    else:
        update = torch.optim.SGD(parameters.values(), lr=LR)
    found: dict[str, Any] = {}
    for name in ("first", "second"):
        columns = plain_columns(model, batch, head)
        if kind == "value":
            values, old, mask = columns["values"], batch["values"], batch["mask"]
            moved = old + (values - old).clamp(-0.2, 0.2)
            errors = torch.maximum((values - batch["returns"]) ** 2, (moved - batch["returns"]) ** 2)
            loss = (batch["weights"] * errors)[mask].sum()
        else:
            loss = plain_policy_loss(kind, columns["log_probs"], batch)
        update.zero_grad()
        loss.backward()
        gradients = {key: p.grad.clone() for key, p in parameters.items() if p.grad is not None}
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients.values()]))
        if name == "first":
            found["gradients"] = gradients
        clip = optimizer.get("clip_grad", 0.0)
        if clip:
            torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
        update.step()
        found[name] = {"loss": float(loss.detach()), "grad_norm": float(norm)}
    found["weights"] = {key: p.detach() for key, p in parameters.items()}
    return found


def check(folder: Path, layout: str, kind: str, budget: int, optimizer: dict[str, Any] | None = None) -> int:
    """Train on a layout, compare everything with the reference, and return the number of micro-batches."""
    optimizer = optimizer or {}
    world, _, tied = LAYOUTS[layout]
    results = run_world(train, world, str(folder), layout, kind, budget, optimizer)
    assert all(result == results[0] for result in results), "metrics differ between ranks"
    result = results[0]
    expected = reference(folder / ("tied" if tied else "untied"), kind, optimizer)
    for name in ("first", "second"):
        assert result[name]["loss"] == pytest.approx(expected[name]["loss"], abs=2e-5)
        assert result[name]["grad_norm"] == pytest.approx(expected[name]["grad_norm"], rel=5e-5)
    saved = torch.load(folder / f"{layout}-{kind}-{result['micro_batches']}.pt")
    if saved["gradients"]:
        assert saved["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in saved["gradients"].items():
        error = (gradient - expected["gradients"][name]).norm() / expected["gradients"][name].norm()
        assert error < 1e-4, f"gradient of {name} is off by {error:.1e}"
    assert saved["weights"].keys() == expected["weights"].keys()
    for name, weight in saved["weights"].items():
        torch.testing.assert_close(weight, expected["weights"][name], atol=2e-5 if optimizer else 2e-6, rtol=1e-5)
    return int(result["micro_batches"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_steps_of_grpo_equal_transformers_and_torch(checkpoints: Path, layout: str) -> None:
    assert check(checkpoints, layout, "clip", 38) >= 2


@pytest.mark.parametrize("layout", ["cp2", "pp2_cp2", "tp2_sp_cp2"])
def test_gspo_sums_over_whole_samples_under_context_parallelism(checkpoints: Path, layout: str) -> None:
    check(checkpoints, layout, "sequence", 38)


@pytest.mark.parametrize("layout", ["single", "tp2_sp", "pp2_cp2"])
def test_two_steps_of_a_critic_equal_transformers_and_torch(checkpoints: Path, layout: str) -> None:
    check(checkpoints, layout, "value", 38)


@pytest.mark.parametrize("layout", ["single", "pp2_tied", "cp2"])
def test_one_micro_batch_and_several_are_the_same(checkpoints: Path, layout: str) -> None:
    assert check(checkpoints, layout, "clip", 1000) < check(checkpoints, layout, "clip", 38)


@pytest.mark.parametrize("layout", ["single", "dp2", "pp2_dp2"])
def test_two_steps_of_the_distributed_optimizer_equal_adamw(checkpoints: Path, layout: str) -> None:
    # With a smaller epsilon, rounding would decide where a gradient is nearly nothing.
    check(checkpoints, layout, "clip", 38, {"name": "adam", "weight_decay": 0.1, "clip_grad": 1.0, "eps": 1e-3})
