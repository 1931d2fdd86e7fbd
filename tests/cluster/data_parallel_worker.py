"""One rank of `test_data_parallel`: python data_parallel_worker.py MODEL OUT RANK WORLD_SIZE."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from milepost.components import Component, ModelLayout, NoOptions
from milepost.config.plan import Choice, Plan
from milepost.config.schema import RunConfig
from milepost.functional.aggregation import token_weights
from milepost.registry import resolve
from milepost.training.ranks import DataParallelRanks
from milepost.training.schedule import make_schedule
from milepost.training.torch_trainer import TorchTrainer
from milepost.training.trainer import Batch
from safetensors.torch import save_file

LENGTHS = [7, 12, 5, 9, 12, 3, 10, 8]


def make_plan(path: Path, size: int) -> Plan:
    config: dict[str, Any] = {
        "model": {"path": str(path)},
        "data": {"path": "none.jsonl"},
        "reward": {"name": "none"},
        "optimizer": {"name": "sgd", "lr": 1.0, "clip_grad": 0.0, "weight_decay": 0.0},
    }
    component: Component[Any] = Component("none", NoOptions, None, lambda _: None, "Nothing.")  # type: ignore[arg-type]
    choice = Choice(component, NoOptions(), "none")
    return Plan(
        config=RunConfig.model_validate(config),
        origins={},
        run_dir=path,
        base_dir=path,
        algorithm=choice,
        advantage=choice,
        reward=choice,
        model=choice,
        transport=choice,
        layout=ModelLayout(2, 16, 4, 2, 8, 31, 0, False, 64),
        model_path=path,
        num_rollouts=1,
        batch_size=8,
        samples_per_prompt=1,
        global_batch_size=8,
        steps_per_rollout=1,
        world_size=size,
        data_parallel=size,
        needs_critic=False,
        needs_reference=False,
        needs_teacher=False,
    )


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(3)
    lengths, total = torch.tensor(LENGTHS), sum(LENGTHS)
    mask = torch.rand(total, generator=generator) < 0.7
    mask[lengths.cumsum(0) - lengths] = False
    columns = {
        "tokens": torch.randint(0, 31, (total,), generator=generator).to(torch.int32),
        "mask": mask,
        "advantages": torch.randn(total, generator=generator),
        "old_log_probs": -torch.rand(total, generator=generator) * 5,
        "weights": token_weights(
            mask, lengths, torch.arange(8), aggregation="sample_mean", global_batch_size=8, constant=1.0
        ),
    }
    return Batch(lengths, columns)


def main(model: Path, out: Path, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    ranks = None
    if size > 1:
        store = dist.FileStore(str(out / "store"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
        ranks = DataParallelRanks()
    recipe, algorithm = resolve("model", "qwen3"), resolve("algorithm", "grpo")
    trainer = TorchTrainer(
        make_plan(model, size),
        recipe=recipe,
        algorithm=algorithm,
        device=torch.device("cpu"),
        dtype=torch.float32,
        ranks=ranks,
    )
    schedule = make_schedule(
        LENGTHS, range(8), data_parallel=size, global_batch_size=8, steps_per_rollout=1, token_budget=20
    )
    batch = make_batch()

    def write(name: str) -> None:
        tensors = {key: tensor.clone() for key, tensor in trainer.source("actor").tensors()}
        save_file(tensors, out / f"{name}-{rank}.safetensors")

    write("before")
    forward = trainer.forward("actor", schedule, batch, ("log_probs",))["log_probs"]
    first = trainer.step("actor", schedule.steps[0], batch)
    write("after")
    # a sample of one rank alone gets an advantage that is not finite
    broken = batch["advantages"].clone()
    broken[batch.token_index([4])] = torch.nan
    batch["advantages"] = broken
    second = trainer.step("actor", schedule.steps[0], batch)
    write("last")
    saved = out / f"saved-{rank}"
    saved.mkdir()
    trainer.save(saved)
    assert replace(trainer.world.ranks[0], node="", device="").data == rank
    found = {"step": dict(first.metrics), "skipped": [first.skipped, second.skipped], "forward": forward.tolist()}
    (out / f"rank-{rank}.json").write_text(json.dumps(found))
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
