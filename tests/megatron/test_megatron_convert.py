"""Conversions between Hugging Face and Megatron: bit for bit, in parallel, and skipped where nothing changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_cases import make_checkpoint
from megatron_world import run_world
from safetensors.torch import load_file, save_file


def there(rank: int, folder: str, out: str) -> dict[str, Any]:
    from milepost.training.megatron.convert import hf_to_megatron
    from milepost_qwen3.recipe import Qwen3Recipe

    done = hf_to_megatron(Path(folder), Path(out), Qwen3Recipe().megatron)
    return {"num_tensors": done.num_tensors, "skipped": done.skipped}


def back(rank: int, folder: str, out: str, limit: int) -> int:
    from milepost.training.megatron import convert
    from milepost_qwen3.recipe import Qwen3Recipe

    convert.MAX_FILE_BYTES = limit
    return convert.megatron_to_hf(Path(folder), Path(out), Qwen3Recipe().megatron).num_tensors


@pytest.mark.parametrize(("ranks", "tied"), [(1, True), (2, False)])
def test_there_and_back_is_exact_and_done_once(tmp_path: Path, ranks: int, tied: bool) -> None:
    path = make_checkpoint(tmp_path / "model", tied=tied)
    saved = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(saved, path / "model.safetensors", {"format": "pt"})
    (path / "tokenizer.json").write_text("{}")
    count = len(saved)
    first = run_world(there, ranks, str(path), str(tmp_path / "out"))
    assert first == [{"num_tensors": count, "skipped": False}] * ranks
    assert run_world(there, 2, str(path), str(tmp_path / "out"))[0]["skipped"]
    # The other number of ranks reads it back, into several files.
    assert run_world(back, 3 - ranks, str(tmp_path / "out"), str(tmp_path / "back"), 20_000) == [count] * (3 - ranks)
    files = sorted((tmp_path / "back").glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    assert (tmp_path / "back" / "tokenizer.json").is_file()

    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.bfloat16)
    assert torch.equal(model.model.norm.weight, saved["model.norm.weight"])
    saved["model.norm.weight"] += 1
    save_file(saved, path / "model.safetensors", {"format": "pt"})
    assert not run_world(there, 1, str(path), str(tmp_path / "out"))[0]["skipped"]
