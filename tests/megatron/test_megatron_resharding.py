"""A checkpoint saved on one layout and loaded on another: training goes on as if nothing had happened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import CPU, EXPERTS, Clip, make_batch, make_checkpoint, make_plan, make_tiny_schedule
from megatron_world import run_world
from milepost.errors import CheckpointError

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {}),
    "tp2_sp": (2, {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, {"pipeline_parallel": 2}),
    "pp2_vpp2": (2, {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}),
    "dp2": (2, {}),
    "cp2": (2, {"context_parallel": 2}),
    "ep2": (2, {"expert_parallel": 2}),
}
OPTIMIZER = {"name": "adam", "lr": 0.02, "eps": 1e-3, "weight_decay": 0.1, "clip_grad": 1.0, "warmup_steps": 5}


def make_trainer(
    path: Path, layout: str, dtype: torch.dtype = torch.float32, critic: bool = True, **sections: Any
) -> Any:
    from milepost.training.megatron.trainer import MegatronTrainer
    from milepost_qwen3.recipe import Qwen3Recipe
    from milepost_qwen3_moe.recipe import Qwen3MoeRecipe

    world, section = LAYOUTS[layout]
    plan = make_plan(path, world=world, trainer=section, critic=True, **{"optimizer": OPTIMIZER, **sections})
    recipes = {"qwen3": Qwen3Recipe, "qwen3_moe": Qwen3MoeRecipe}
    recipe = recipes[json.loads((path / "config.json").read_text())["model_type"]]()
    return MegatronTrainer(plan, recipe=recipe, algorithm=Clip(), device=CPU, dtype=dtype)


def steps(trainer: Any, layout: str, count: int) -> list[dict[str, float]]:
    """Steps of actor and critic; each step is on the same batch."""
    world, section = LAYOUTS[layout]
    batch = make_batch()
    batch["old_log_probs"] = -torch.ones(batch.num_tokens) * 4
    model_ranks = section.get("tensor_parallel", 1) * section.get("pipeline_parallel", 1)
    data_parallel = world // model_ranks // section.get("context_parallel", 1)
    step = make_tiny_schedule(data_parallel, 38, interleave=2).steps[0]
    metrics = []
    for _ in range(count):
        metrics.append(dict(trainer.step("actor", step, batch).metrics))
        metrics.append(dict(trainer.step("critic", step, batch).metrics))
    return metrics


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {f"{role}.{k}": v.clone() for role in ("actor", "critic") for k, v in trainer.source(role).tensors()}


def save_and_go_on(rank: int, path: str, layout: str, dtype: torch.dtype) -> None:
    folder = Path(path)
    trainer = make_trainer(folder / "model", layout, dtype)
    steps(trainer, layout, 2)
    trainer.save(folder / layout)
    metrics = steps(trainer, layout, 2)
    found = weights(trainer)
    if rank == 0:
        torch.save({"weights": found, "metrics": metrics}, folder / f"{layout}.pt")


def load_and_go_on(rank: int, path: str, saved: str, layout: str, dtype: torch.dtype) -> None:
    folder = Path(path)
    trainer = make_trainer(folder / "model", layout, dtype)
    trainer.load(folder / saved)
    metrics = steps(trainer, layout, 2)
    found = weights(trainer)
    if rank == 0:
        torch.save({"weights": found, "metrics": metrics}, folder / f"{saved}-{layout}.pt")


def load_fails(rank: int, path: str, saved: str, optimizer: dict[str, Any]) -> str:
    folder = Path(path)
    trainer = make_trainer(folder / "model", "single", optimizer=optimizer)
    try:
        trainer.load(folder / saved)
    except CheckpointError as error:
        return str(error)
    return "loaded"


def start_from(rank: int, path: str, saved: str) -> dict[str, float]:
    """How far the weights of a run that starts from the checkpoint lie from those saved, and its learning rate."""
    folder = Path(path)
    run = folder / "run"
    run.mkdir(exist_ok=True)
    (run / "trainer").symlink_to(folder / saved)
    resumed = make_trainer(folder / "model", "single")
    resumed.load(folder / saved)
    expected = weights(resumed)
    trainer = make_trainer(folder / "model", "single", checkpoint={"init_from": str(run)})
    found = weights(trainer)
    far = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    return {"far": far, "lr": steps(trainer, "single", 1)[0]["lr"]}


def _folder(tmp_path: Path, tied: bool, *saved: str, architecture: str = "qwen3", **changes: Any) -> Path:
    make_checkpoint(tmp_path / "model", architecture, tied=tied, **changes)
    for name in saved:
        (tmp_path / name).mkdir()
    return tmp_path


def _check(folder: Path, saved: str, layout: str, dtype: torch.dtype = torch.float32) -> None:
    expected = torch.load(folder / f"{saved}.pt")
    run_world(load_and_go_on, LAYOUTS[layout][0], str(folder), saved, layout, dtype)
    found = torch.load(folder / f"{saved}-{layout}.pt")
    for got, want in zip(found["metrics"], expected["metrics"], strict=True):
        assert got["lr"] == want["lr"]
        assert got["loss"] == pytest.approx(want["loss"], abs=2e-5)
    for name, weight in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, atol=2e-5, rtol=1e-5)


def test_one_rank_to_all_layouts(tmp_path: Path) -> None:
    folder = _folder(tmp_path, True, "single")
    run_world(save_and_go_on, 1, str(folder), "single", torch.float32)
    for layout in ("single", "tp2_sp", "pp2", "pp2_vpp2", "dp2", "cp2"):
        _check(folder, "single", layout)
    error = run_world(load_fails, 1, str(folder), "single", OPTIMIZER | {"name": "sgd"})[0]
    assert "is of optimizer 'adam', this run's is 'sgd'" in error
    fresh = run_world(start_from, 1, str(folder), "single")[0]
    assert fresh == {"far": 0.0, "lr": pytest.approx(0.02 / 5)}


@pytest.mark.parametrize("saved", ["tp2_sp", "pp2_vpp2", "dp2"])
def test_layouts_to_one_rank(tmp_path: Path, saved: str) -> None:
    folder = _folder(tmp_path, False, saved)
    run_world(save_and_go_on, 2, str(folder), saved, torch.float32)
    _check(folder, saved, "single")


def test_shared_experts_go_on_where_experts_are_shared(tmp_path: Path) -> None:
    folder = _folder(tmp_path, False, "ep2", architecture="qwen3_moe", **EXPERTS)
    run_world(save_and_go_on, 2, str(folder), "ep2", torch.float32)
    _check(folder, "ep2", "ep2")
    error = run_world(load_fails, 1, str(folder), "ep2", OPTIMIZER)[0]
    assert "was saved with experts shared by its ranks, in this run they are not" in error
    assert "set trainer.expert_parallel to what it was" in error


def test_bfloat16_keeps_its_float32_masters(tmp_path: Path) -> None:
    folder = _folder(tmp_path, False, "dp2")
    run_world(save_and_go_on, 2, str(folder), "dp2", torch.bfloat16)
    expected = torch.load(folder / "dp2.pt")["weights"]
    run_world(load_and_go_on, 2, str(folder), "dp2", "dp2", torch.bfloat16)
    found = torch.load(folder / "dp2-dp2.pt")["weights"]
    for name, weight in expected.items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(found[name], weight), name
