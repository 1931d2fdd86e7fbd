"""The Megatron trainer's other promises: head, reference, skipped steps, phases, the CPU shim, plain errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import CPU, TEMPERATURE, Clip, make_batch, make_checkpoint, make_plan, make_tiny_schedule
from megatron_world import run_world
from milepost.errors import ConfigError, MilepostError, PhaseError
from milepost.training.logprobs import HeadSettings, token_log_probs
from torch import Tensor


def make_trainer(path: str, world: int = 1, dtype: torch.dtype = torch.float32, **sections: Any) -> Any:
    from milepost.training.megatron.trainer import MegatronTrainer
    from milepost_qwen3.recipe import Qwen3Recipe

    plan = make_plan(Path(path), world=world, **sections)
    return MegatronTrainer(plan, recipe=Qwen3Recipe(), algorithm=Clip(), device=CPU, dtype=dtype)


def old_batch() -> Any:
    batch = make_batch()
    batch["old_log_probs"] = -torch.ones(batch.num_tokens) * 4
    return batch


def message_of(call: Callable[[], object]) -> str:
    """What a MilepostError or ValueError says that the call raises, with its class."""
    try:
        call()
    except (MilepostError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def vocab_head(rank: int, vocab: int) -> dict[str, Any]:
    """Largest differences of the head over two ranks from the head of one."""
    import torch.distributed as dist
    from milepost.training.megatron.head import vocab_parallel_log_probs

    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(23, 8, generator=generator, dtype=torch.float64)
    weight = torch.randn(64, 8, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab, (23,), generator=generator)
    grads = torch.randn(2, 23, generator=generator, dtype=torch.float64)
    settings = HeadSettings(TEMPERATURE, chunk_elements=5 * 32)

    def run(h: Tensor, w: Tensor, head: Callable[..., Any]) -> list[Tensor]:
        h, w = h.clone().requires_grad_(), w.clone().requires_grad_()
        log_probs, entropy = head(h, w)
        ((log_probs * grads[0]).sum() + (entropy * grads[1]).sum()).backward()
        assert h.grad is not None
        assert w.grad is not None
        return [log_probs.detach(), entropy.detach(), h.grad, w.grad]

    expected = run(hidden, weight[:vocab], lambda h, w: token_log_probs(h, w, targets, settings=settings, entropy=True))
    mine = weight[rank * 32 : (rank + 1) * 32]
    options: dict[str, Any] = {"group": dist.group.WORLD, "vocab_size": vocab, "settings": settings, "entropy": True}
    found = run(hidden, mine, lambda h, w: vocab_parallel_log_probs(h, w, targets, **options))
    dist.all_reduce(found[2])
    whole = torch.zeros(64, 8, dtype=torch.float64)
    whole[:vocab] = expected[3]
    expected[3] = whole[rank * 32 : (rank + 1) * 32]
    return {str(i): float((a - b).abs().max()) for i, (a, b) in enumerate(zip(found, expected, strict=True))}


@pytest.mark.parametrize("vocab", [64, 50, 20])
def test_the_head_over_two_ranks_is_the_head_of_one(vocab: int) -> None:
    for differences in run_world(vocab_head, 2, vocab):
        assert all(difference < 1e-12 for difference in differences.values()), differences


def reference_role(rank: int, path: str) -> dict[str, Any]:
    trainer = make_trainer(path, 2, trainer={"tensor_parallel": 2})
    batch, schedule = old_batch(), make_tiny_schedule(1, 40)
    before = trainer.forward("actor", schedule, batch, ("log_probs",))
    trainer.step("actor", schedule.steps[0], batch)
    after = trainer.forward("actor", schedule, batch, ("log_probs",))
    frozen = trainer.forward("reference", schedule, batch, ("log_probs",))
    if rank:
        return {"ranks": [before, after, frozen]}
    return {
        # Weights lie elsewhere in memory, so matrix products may round otherwise.
        "same": torch.allclose(before["log_probs"], frozen["log_probs"], atol=1e-5),
        "moved": not torch.allclose(before["log_probs"], after["log_probs"], atol=1e-3),
        "teacher": message_of(lambda: trainer.forward("teacher", schedule, batch, ("log_probs",))),
    }


def test_the_reference_stays_what_the_actor_was(tmp_path: Path) -> None:
    first, second = run_world(reference_role, 2, str(make_checkpoint(tmp_path / "model")))
    assert first["same"]
    assert first["moved"]
    assert "teacher.path: the algorithm asks a teacher, but none is given" in first["teacher"]
    assert second["ranks"] == [{}, {}, {}]


def skipped_step(rank: int, path: str) -> dict[str, Any]:
    trainer = make_trainer(path, 2, trainer={"pipeline_parallel": 2}, optimizer={"name": "adam", "warmup_steps": 4})
    batch, step = old_batch(), make_tiny_schedule(1, 40).steps[0]
    before = {name: tensor.clone() for name, tensor in trainer.source("actor").tensors()}
    good = batch["advantages"].clone()
    batch["advantages"] = torch.where(batch["mask"], torch.inf, good)
    skipped = trainer.step("actor", step, batch)
    unchanged = all(torch.equal(before[name], tensor) for name, tensor in trainer.source("actor").tensors())
    batch["advantages"] = good
    applied = trainer.step("actor", step, batch)
    return {"skipped": skipped.skipped, "unchanged": unchanged, "lr": applied.metrics["lr"], "then": applied.skipped}


def test_a_step_that_is_not_finite_changes_nothing_on_any_rank(tmp_path: Path) -> None:
    for found in run_world(skipped_step, 2, str(make_checkpoint(tmp_path / "model"))):
        assert found == {"skipped": True, "unchanged": True, "lr": 1e-2 / 4, "then": False}


def phases(rank: int, path: str) -> dict[str, str]:
    trainer = make_trainer(path)
    batch, schedule = old_batch(), make_tiny_schedule(1, 40)
    trainer.offload("actor", ("gradients", "optimizer"))
    found = {"step": message_of(lambda: trainer.step("actor", schedule.steps[0], batch))}
    found["forward"] = message_of(lambda: trainer.forward("actor", schedule, batch, ("log_probs",)))
    trainer.onload("actor", ("weights", "gradients", "optimizer"))
    found["again"] = message_of(lambda: trainer.step("actor", schedule.steps[0], batch))
    found["values"] = message_of(lambda: trainer.forward("actor", schedule, batch, ("values",)))
    found["critic"] = message_of(lambda: trainer.step("critic", schedule.steps[0], batch))
    return found


def test_parts_that_are_away_may_not_be_used(tmp_path: Path) -> None:
    found = run_world(phases, 1, str(make_checkpoint(tmp_path / "model")))[0]
    assert found["step"].startswith(PhaseError.__name__)
    assert "gradients and optimizer are offloaded" in found["step"]
    assert found["forward"] == found["again"] == "nothing was raised"
    assert "values were asked of a role without a value head" in found["values"]
    assert "role 'critic' is not trained in this run" in found["critic"]


def two_precisions(rank: int, path: str) -> list[float]:
    from milepost.training.megatron import parallel

    losses = []
    for dtype in (torch.float32, torch.bfloat16):
        trainer = make_trainer(path, 2, dtype, optimizer={"name": "adam", "lr": 1e-4})
        batch, step = old_batch(), make_tiny_schedule(2, 40).steps[0]
        metrics = [trainer.step("actor", step, batch).metrics for _ in range(8)]
        losses += [metrics[0]["loss"], metrics[0]["loss"] - metrics[-1]["loss"]]
        trainer.close()
        parallel.destroy()
    return losses


def test_bfloat16_learns_what_float32_does_by_its_float32_masters(tmp_path: Path) -> None:
    # Steps of 1e-4 are lost on weights in bfloat16, whose neighbours lie about 1e-3 apart.
    exact, gain, rough, rough_gain = run_world(two_precisions, 2, str(make_checkpoint(tmp_path / "model")))[0]
    assert rough == pytest.approx(exact, abs=0.03)
    assert gain > 0
    assert rough_gain == pytest.approx(gain, rel=0.35)


def wrong_layouts(rank: int, path: str) -> dict[str, str]:
    greedy = {"temperature": 0.0}
    return {
        "kv": message_of(lambda: make_trainer(path, 4, trainer={"tensor_parallel": 4})),
        "greedy": message_of(lambda: make_trainer(path, 4, rollout=greedy)),
        "groups": message_of(lambda: make_trainer(path, 4, trainer={"tensor_parallel": 2})),
    }


def test_a_layout_that_does_not_fit_the_model_is_an_error_that_names_it(tmp_path: Path) -> None:
    found = run_world(wrong_layouts, 4, str(make_checkpoint(tmp_path / "model")))[0]
    assert found["kv"].startswith(ConfigError.__name__)
    assert "trainer.tensor_parallel: 4 does not divide the model's 2 key-value heads" in found["kv"]
    assert "rollout.temperature: 0.0 is greedy" in found["greedy"]
    assert "this process has groups of" in found["groups"]


def other_version(rank: int) -> dict[str, Any]:
    import megatron.core
    from milepost.training.megatron import cpu

    real = torch.Tensor.cuda
    megatron.core.__version__ = "0.17.0"
    refused = message_of(cpu.install)
    untouched = torch.Tensor.cuda is real
    megatron.core.__version__ = cpu.VERSION
    cpu.install()
    cpu.install()
    import megatron.core.optimizer as optimizers

    return {
        "refused": refused,
        "untouched": untouched,
        "device": str(optimizers.torch.cuda.current_device()),
        "torch": torch.cuda.is_available() or torch.cuda is not optimizers.torch.cuda,
    }


def test_the_cpu_shim_knows_one_version_and_leaves_torch_alone() -> None:
    found = run_world(other_version, 1)[0]
    assert "megatron-core 0.17.0 is installed" in found["refused"]
    assert "pip install megatron-core==0.16.1" in found["refused"]
    assert (found["untouched"], found["device"], found["torch"]) == (True, "cpu", True)
