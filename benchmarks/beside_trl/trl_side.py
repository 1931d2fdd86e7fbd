"""TRL's side of the comparison: its GRPOTrainer as its documentation sets it up for a CPU; see `turns` and `run`."""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1", "CUDA_VISIBLE_DEVICES": ""}

import torch
from datasets import Dataset
from task import LR, digit_share, prompts
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback, set_seed
from trl import GRPOConfig, GRPOTrainer
from turns import Side


class TakeTurns(TrainerCallback):
    def __init__(self, side: Side) -> None:
        self.side = side

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.side.step_begins()
        if self.side.stopped:
            # Nobody waits for the end of training.
            os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--group", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    set_seed(0)
    side = Side()

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        side.count(len(completions), sum(map(len, completion_ids)))
        return [digit_share(text) for text in completions]

    model = AutoModelForCausalLM.from_pretrained(given.folder / "model", dtype=torch.float32)
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            max_steps=1_000_000,
            per_device_train_batch_size=given.prompts * given.group,
            gradient_accumulation_steps=1,
            num_generations=given.group,
            max_completion_length=given.new_tokens,
            temperature=1.0,
            learning_rate=LR,
            lr_scheduler_type="constant",
            beta=0.0,
            loss_type="dapo",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            seed=0,
        )
        GRPOTrainer(
            model=model,
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in prompts()]),
            processing_class=AutoTokenizer.from_pretrained(given.folder / "model"),
            callbacks=[TakeTurns(side)],
        ).train()


if __name__ == "__main__":
    main()
