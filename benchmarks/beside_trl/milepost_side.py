"""milepost's side of the comparison: `milepost train` on a run config, with a stop between iterations; see `turns`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import yaml
from milepost import loop
from milepost.cli.options import load
from milepost.config.plan import make_plan
from task import LR
from turns import Side

HERE = Path(__file__).resolve().parent


def run_config(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    return {
        "run": {"dir": str(folder / "run"), "threads": given.threads, "device": "cpu"},
        "model": {"path": str(given.folder / "model")},
        "data": {"path": str(given.folder / "prompts.jsonl"), "label": None},
        "rollout": {
            "num_rollouts": 1_000_000,
            "batch_size": given.prompts,
            "samples_per_prompt": given.group,
            "max_response_len": given.new_tokens,
        },
        "reward": {"name": "python", "function": "task:score", "placement": given.placement},
        "algorithm": {"name": "grpo", "aggregation": "token_mean"},
        "optimizer": {"lr": LR, "betas": [0.9, 0.999], "weight_decay": 0.0},
        "checkpoint": {"resume": "never"},
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--placement", choices=["process", "inline"], default="process")
    given = parser.parse_args()
    side = Side()
    generate, learn = loop.generate, loop.learn

    async def generate_in_turn(run: Any, index: int) -> Any:
        side.step_begins()
        return None if side.stopped else await generate(run, index)

    def learn_and_count(run: Any, index: int, rollout: Any) -> None:
        side.count(len(rollout.samples), sum(sample.num_trainable for sample in rollout.samples))
        learn(run, index, rollout)

    # The loop looks its parts up when it runs; everything else is what `milepost train` does.
    loop.generate, loop.learn = generate_in_turn, learn_and_count
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "run.yaml"
        config.write_text(yaml.safe_dump(run_config(folder, given)), encoding="utf-8")
        (folder / "task.py").symlink_to(HERE / "task.py")
        loop.train(make_plan(load((str(config),), (), ())), progress=False)


if __name__ == "__main__":
    main()
