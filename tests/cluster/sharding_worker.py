"""One of the two ranks of `test_sharding`: python sharding_worker.py MODEL OUT RANK.

Each rank also trains alone what both train together, so that the two can be compared.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from data_parallel_worker import LENGTHS, make_batch, make_plan
from milepost.config.schema import RunConfig
from milepost.registry import resolve
from milepost.training.ranks import DataParallelRanks
from milepost.training.schedule import Schedule, StepSchedule
from milepost.training.torch_trainer import TorchTrainer
from milepost.training.trainer import Batch, Role, StepResult
from safetensors.torch import save_file

OPTIMIZER = {"name": "adam", "lr": 0.01, "weight_decay": 0.1, "betas": [0.9, 0.98], "eps": 1e-3, "clip_grad": 0.05}
ROLES: tuple[Role, ...] = ("actor", "critic")
MICRO_BATCHES = {
    1: (((0, 1, 2), (3,), (4, 5, 6, 7)),),
    # Of sample 3 nothing is trainable, and the second rank has one micro-batch less.
    2: (((0, 1, 2), (3,)), ((4, 5, 6, 7), ())),
}


def make_trainer(model: Path, size: int, dtype: torch.dtype = torch.float32, **settings: Any) -> TorchTrainer:
    plan = make_plan(model, size)
    config = plan.config.model_dump()
    config["optimizer"] |= OPTIMIZER
    config["trainer"] |= settings
    plan = replace(plan, config=RunConfig.model_validate(config), needs_critic=True, needs_reference=True)
    return TorchTrainer(
        plan,
        recipe=resolve("model", "qwen3"),
        algorithm=resolve("algorithm", "ppo"),
        device=torch.device("cpu"),
        dtype=dtype,
        ranks=DataParallelRanks() if size > 1 else None,
    )


def sharded(model: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> TorchTrainer:
    return make_trainer(model, 2, dtype, sharding="full", **settings)


def batch_of_both_roles() -> Batch:
    batch = make_batch()
    batch["mask"][batch.token_index([3])] = False
    batch["weights"][batch.token_index([3])] = 0.0
    generator = torch.Generator().manual_seed(4)
    batch["values"] = torch.randn(sum(LENGTHS), generator=generator)
    batch["returns"] = torch.randn(sum(LENGTHS), generator=generator)
    return batch


def main(model: Path, out: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(out / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    batch = batch_of_both_roles()
    steps = {size: StepSchedule(ranks, sum(LENGTHS)) for size, ranks in MICRO_BATCHES.items()}
    found: dict[str, Any] = {}

    def write(name: str, trainer: TorchTrainer, role: Role = "actor") -> None:
        source = trainer.source(role)
        tensors = dict(source.tensors())
        assert [(s.name, s.shape, s.dtype) for s in source.specs()] == [
            (key, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for key, tensor in tensors.items()
        ]
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, out / f"{name}-{role}-{rank}.safetensors")

    def step(trainer: TorchTrainer, size: int) -> dict[str, StepResult]:
        return {role: trainer.step(role, steps[size], batch) for role in ROLES}

    def save(trainer: TorchTrainer, name: str, *, here: bool = True) -> Path:
        folder = out / name
        folder.mkdir(exist_ok=True)
        if here:
            trainer.save(folder)
        dist.barrier()
        return folder

    alone, both = make_trainer(model, 1), sharded(model, recompute="full")
    parameters = list(both._trained["actor"].policy.parameters())
    found["parts"] = [sum(p.to_local().numel() for p in parameters), sum(p.numel() for p in parameters)]
    write("before-alone", alone)
    write("before-both", both)
    for name, trainer, size in (("alone", alone, 1), ("both", both, 2)):
        schedule = Schedule((steps[size],), ())
        found[f"forward-{name}"] = {
            "log_probs": trainer.forward("actor", schedule, batch, ("log_probs",))["log_probs"].tolist(),
            "reference": trainer.forward("reference", schedule, batch, ("log_probs",))["log_probs"].tolist(),
            "values": trainer.forward("critic", schedule, batch, ("values",))["values"].tolist(),
        }
        results = [step(trainer, size), step(trainer, size)]
        found[f"metrics-{name}"] = [{role: dict(result.metrics) for role, result in r.items()} for r in results]
        for role in ROLES:
            write(f"after-{name}", trainer, role)
    found["shards"] = [(s.name, s.shape, s.slices, tuple(s.view.shape)) for s in both.source("actor").shards()]

    # A checkpoint does not tell how many ranks wrote it.
    by_both = save(both, "saved-both")
    by_one = save(alone, "saved-alone", here=rank == 0)
    resumed, resharded, gathered = sharded(model, recompute="full"), sharded(model), make_trainer(model, 1)
    resumed.load(by_both)
    gathered.load(by_both)
    resharded.load(by_one)
    for name, trainer, size in (
        ("both", both, 2),
        ("resumed", resumed, 2),
        ("alone", alone, 1),
        ("gathered", gathered, 1),
        ("resharded", resharded, 2),
    ):
        step(trainer, size)
        write(f"third-{name}", trainer)
        write(f"third-{name}", trainer, "critic")

    # A sample of one rank alone is not finite.
    advantages = batch["advantages"].clone()
    advantages[batch.token_index([5])] = torch.nan
    broken = Batch(batch.lengths, {**batch.columns, "advantages": advantages})
    found["skipped"] = both.step("actor", steps[2], broken).skipped
    write("skipped-both", both)

    # bfloat16 computes, float32 is updated.
    low, one_low = sharded(model, torch.bfloat16), make_trainer(model, 1, torch.bfloat16)
    step(low, 2)
    write("low-both", low)
    one_low.load(save(low, "saved-low"))
    write("low-alone", one_low)
    again = save(one_low, "saved-low-again", here=rank == 0)
    low.load(again)
    write("low-again", low)
    (out / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
