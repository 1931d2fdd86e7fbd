"""Two torch trainer ranks in two processes against one: gradients, metrics, skipped steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

WORKER = Path(__file__).parent / "data_parallel_worker.py"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    path = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """World size to the folder that its ranks wrote to; the three processes run at the same time."""
    folders = {size: tmp_path_factory.mktemp(f"world{size}") for size in (1, 2)}
    processes = [
        subprocess.Popen([sys.executable, str(WORKER), str(model), str(folder), str(rank), str(size)])
        for size, folder in folders.items()
        for rank in range(size)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0, 0]
    return folders


def read(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"rank-{rank}.json").read_text())


def test_gradients_of_two_ranks_are_one_ranks(ranks: dict[int, Path]) -> None:
    # SGD with rate 1 and no clipping: what a weight lost is its gradient
    (before,) = ranks[1].glob("before-0.safetensors")
    start, one = load_file(before), load_file(ranks[1] / "after-0.safetensors")
    scale = max(float((start[name] - one[name]).abs().max()) for name in start)
    assert scale > 1e-3
    for rank in range(2):
        two = load_file(ranks[2] / f"after-{rank}.safetensors")
        assert two.keys() == one.keys()
        for name, tensor in one.items():
            assert float((two[name] - tensor).abs().max()) <= 1e-6 * scale, name


def test_both_ranks_have_the_same_bits(ranks: dict[int, Path]) -> None:
    first, second = (load_file(ranks[2] / f"after-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_metrics_are_those_of_one_rank(ranks: dict[int, Path]) -> None:
    one = read(ranks[1], 0)["step"]
    assert {"loss", "grad_norm", "ratio_max", "entropy"} <= one.keys()
    for rank in range(2):
        assert read(ranks[2], rank)["step"] == pytest.approx(one, rel=1e-5, abs=1e-6)


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_all(ranks: dict[int, Path]) -> None:
    assert read(ranks[1], 0)["skipped"] == [False, True]
    assert [read(ranks[2], rank)["skipped"] for rank in range(2)] == [[False, True]] * 2
    for folder, rank in ((ranks[1], 0), (ranks[2], 0), (ranks[2], 1)):
        before, after = load_file(folder / f"after-{rank}.safetensors"), load_file(folder / f"last-{rank}.safetensors")
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_forward_pass_fills_in_a_ranks_own_samples(ranks: dict[int, Path]) -> None:
    one = torch.tensor(read(ranks[1], 0)["forward"])
    parts = [torch.tensor(read(ranks[2], rank)["forward"]) for rank in range(2)]
    assert not ((parts[0] != 0) & (parts[1] != 0)).any()
    torch.testing.assert_close(parts[0] + parts[1], one, rtol=0, atol=1e-6)


def test_the_first_rank_alone_writes_a_checkpoint(ranks: dict[int, Path]) -> None:
    assert sorted(path.name for path in (ranks[2] / "saved-0").iterdir()) == [
        "actor-optimizer.safetensors",
        "actor.safetensors",
        "random.safetensors",
    ]
    assert list((ranks[2] / "saved-1").iterdir()) == []
