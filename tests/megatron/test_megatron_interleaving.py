"""Interleaved pipeline stages: what is being sent stays in memory until it has gone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron_cases import CPU, Clip, make_batch, make_checkpoint, make_plan, make_tiny_schedule
from megatron_world import run_world

PP2_VPP2 = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}


class Sent:
    """A send, and the memory that was given to it."""

    def __init__(self, handle: Any, tensor: torch.Tensor, found: list[bool]) -> None:
        self.handle = handle
        self.tensor = tensor
        self.address = tensor.data_ptr()
        self.found = found

    def wait(self) -> None:
        self.found.append(self.tensor.data_ptr() == self.address)
        self.handle.wait()


def step(rank: int, path: str) -> list[bool]:
    """One step; for every send that was waited for, whether its tensor had the same memory from begin to end."""
    from megatron.core.pipeline_parallel import p2p_communication
    from milepost.training.megatron.trainer import MegatronTrainer
    from milepost_qwen3.recipe import Qwen3Recipe

    found: list[bool] = []
    exchange = p2p_communication._p2p_ops

    def watched(**tensors: Any) -> dict[str, Any]:
        handles = exchange(**tensors)
        sends = {name: Sent(handles[name], tensors[f"tensor_{name}"], found) for name in handles if "send" in name}
        return {**handles, **sends}

    p2p_communication._p2p_ops = watched
    plan = make_plan(Path(path), world=2, trainer=PP2_VPP2)
    trainer = MegatronTrainer(plan, recipe=Qwen3Recipe(), algorithm=Clip(), device=CPU, dtype=torch.float32)
    batch = make_batch()
    batch["old_log_probs"] = -torch.ones(batch.num_tokens) * 4
    schedule = make_tiny_schedule(1, 38, interleave=2).steps[0]
    trainer.step("actor", schedule, batch)
    return found


def test_a_tensor_keeps_its_memory_until_it_is_sent(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    for found in run_world(step, 2, str(path)):
        assert len(found) > 8
        assert all(found)
