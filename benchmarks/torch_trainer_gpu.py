"""The torch trainer on one GPU beside the same step on a CPU in float32: gradients, recompute, offload, resume.

    python benchmarks/torch_trainer_gpu.py [--out table.json]

A small Qwen3 with grouped-query attention, ragged samples in several micro-batches. For float32 and bfloat16 and every
setting of `trainer.recompute` it prints the distance of all gradients from the CPU's, relative to their norm; whether
old log-probs are exactly those of the step; and whether weights after offload, onload and resume are equal bit for bit.
Exits with 1 where one is not as it must be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import torch
from milepost.config.loading import load_config
from milepost.config.plan import Plan, make_plan
from milepost.functional.aggregation import token_weights
from milepost.training.schedule import Schedule, StepSchedule, make_schedule
from milepost.training.torch_trainer import TorchTrainer
from milepost.training.trainer import Batch, Part
from transformers import Qwen3Config, Qwen3ForCausalLM

LENGTHS = [70, 129, 55, 97, 120, 33, 100, 88]
VOCABULARY = 512
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 3e-2}
"""Largest distance of the gradients from the CPU's in float32."""
EVERYTHING: tuple[Part, ...] = ("weights", "gradients", "optimizer")


def make_run(folder: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    (folder / "data.jsonl").write_text('{"prompt": "1", "label": "1"}\n')
    path = folder / "run.yaml"
    path.write_text(
        "model: {path: model}\ndata: {path: data.jsonl}\nreward: {name: deepscaler}\noptimizer: {lr: 1.0e-3}\n"
        "rollout: {num_rollouts: 2, batch_size: 2, samples_per_prompt: 4, max_response_len: 100}\n"
    )
    return path


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS)
    num_tokens = int(lengths.sum())
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
    positions = torch.arange(num_tokens) - torch.repeat_interleave(starts, lengths)
    mask = positions >= 10
    return Batch(
        lengths,
        {
            "tokens": torch.randint(0, VOCABULARY, (num_tokens,), generator=generator, dtype=torch.int32),
            "mask": mask,
            "advantages": torch.randn(num_tokens, generator=generator) * mask,
            "weights": token_weights(mask, lengths, torch.arange(len(LENGTHS)), aggregation="sample_mean"),
        },
    )


def make_step() -> StepSchedule:
    schedule = make_schedule(
        LENGTHS,
        list(range(len(LENGTHS))),
        data_parallel=1,
        global_batch_size=len(LENGTHS),
        steps_per_rollout=1,
        token_budget=256,
    )
    return schedule.steps[0]


def make_trainer(plan: Plan, dtype: torch.dtype, device: str) -> TorchTrainer:
    torch.manual_seed(0)
    algorithm = plan.algorithm.build()
    return TorchTrainer(plan, recipe=plan.model.build(), algorithm=algorithm, device=torch.device(device), dtype=dtype)


def weights(trainer: TorchTrainer) -> list[torch.Tensor]:
    return [tensor.detach().float().cpu().clone() for _, tensor in trainer.source("actor").tensors()]


def difference(before: list[torch.Tensor], after: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    """Distance of one update from another, relative to the latter's norm."""
    moved = [b - a for a, b in zip(before, after, strict=True)]
    error = sum(float((m - r).square().sum()) for m, r in zip(moved, reference, strict=True))
    return float((error / sum(float(r.square().sum()) for r in reference)) ** 0.5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this compares a GPU with the CPU, and torch finds no GPU here")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = make_run(folder)
        # Plain SGD of rate 1 without clipping: what a step changes is the gradient itself.
        sgd = ("optimizer.name=sgd", "optimizer.lr=1", "optimizer.clip_grad=0", "optimizer.weight_decay=0")
        batch, step = make_batch(), make_step()
        cpu = make_trainer(make_plan(load_config([path], sgd)), torch.float32, "cpu")
        before = weights(cpu)
        cpu.step("actor", step, batch)
        gradient = [b - a for a, b in zip(before, weights(cpu), strict=True)]
        for dtype in (torch.float32, torch.bfloat16):
            for recompute in ("none", "selective", "full"):
                setting = f"trainer.recompute={recompute}"
                trainer = make_trainer(make_plan(load_config([path], (*sgd, setting))), dtype, "cuda")
                # bfloat16 weights round what a step of rate 1 gives; the master copies do not.
                initial = masters(trainer)
                trainer.step("actor", step, batch)
                distance = difference(initial, masters(trainer), gradient)
                rows.append(check(path, setting, dtype, step, folder) | {"recompute": recompute, "distance": distance})
    for row in rows:
        print(row)
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=2) + "\n")
    limits = {str(dtype): limit for dtype, limit in LIMITS.items()}
    failed = [row for row in rows if row["distance"] > limits[row["dtype"]] or not row["equal"] or row["old_diff"]]
    sys.exit(f"not as it must be: {failed}" if failed else 0)


def masters(trainer: TorchTrainer) -> list[torch.Tensor]:
    """The float32 weights the optimizer keeps, in the source's order."""
    optimizer = trainer._trained["actor"].optimizer
    named = {
        name: view
        for group in optimizer.groups
        for name, view in zip(group.names, group.views(group.master.detach()), strict=True)
    }
    return [named[name].float().cpu().clone() for name, _ in trainer.source("actor").tensors()]


def check(path: Path, setting: str, dtype: torch.dtype, step: StepSchedule, folder: Path) -> dict[str, object]:
    """Old log-probs, offload and resume, with AdamW."""
    plan = make_plan(load_config([path], (setting,)))
    one, other = make_trainer(plan, dtype, "cuda"), make_trainer(plan, dtype, "cuda")
    batch = make_batch()
    batch["old_log_probs"] = one.forward("actor", Schedule((step,)), batch, ("log_probs",))["log_probs"]
    result = one.step("actor", step, batch)
    saved = Path(tempfile.mkdtemp(dir=folder))
    one.save(saved)
    other.load(saved)
    held = torch.cuda.memory_allocated()
    one.offload("actor", EVERYTHING)
    released = held - torch.cuda.memory_allocated()
    one.onload("actor", EVERYTHING)
    batch = make_batch()
    for trainer in (one, other):
        trainer.step("actor", step, batch)
    equal = all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
    return {
        "dtype": str(dtype),
        "old_diff": result.metrics["old_log_prob_diff"],
        "released_mb": round(released / 2**20, 1),
        "equal": equal,
    }


if __name__ == "__main__":
    main()
