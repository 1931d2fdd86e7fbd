"""The walk-through of an in-house recipe: the very file on the page keeps every promise and converts bit for bit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from milepost.config.loading import load_config
from milepost.config.plan import make_plan
from milepost.conversion import convert
from milepost.errors import ConfigError
from milepost.registry import Registry, use
from milepost.testing.plugins import Settings, check_records, plugins_at
from transformers import MistralConfig, MistralForCausalLM

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Path]:
    ((name, source),) = BLOCK.findall((ROOT / "docs/plugins/recipe-walkthrough.md").read_text())
    file = tmp_path / name
    file.write_text(source)
    yield file
    use(None)


def make_mistral(folder: Path, window: int | None) -> Path:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        sliding_window=window,
    )
    MistralForCausalLM(config).save_pretrained(folder)
    return folder


def test_the_file_on_the_page_keeps_every_promise(module: Path, tmp_path: Path) -> None:
    path = make_mistral(tmp_path / "mistral", None)
    with plugins_at(module) as (registry, records):
        use(registry)
        reports = check_records(records, Settings(config=path))
    assert [report.what for report in reports] == ["plugin house_mistral", "model house-mistral"]
    assert [str(finding) for report in reports for finding in report.findings] == []


def test_a_mistral_goes_to_megatron_and_back(module: Path, tmp_path: Path) -> None:
    registry = Registry.load(modules=[module.stem], base_dir=tmp_path)
    path = make_mistral(tmp_path / "mistral", None)
    there = convert(path, tmp_path / "there", registry, progress=False)
    assert (there.recipe, there.num_tensors) == ("house-mistral", 21)  # 9 of each layer, embedding, norm and head
    convert(there.folder, tmp_path / "back", registry, progress=False)
    assert (tmp_path / "back/model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


def test_a_window_is_refused_when_planning(module: Path, tmp_path: Path) -> None:
    make_mistral(tmp_path / "mistral", 16)
    (tmp_path / "train.jsonl").write_text('{"prompt": "1+1=", "label": "2"}\n' * 8)
    (tmp_path / "run.yaml").write_text(
        "model: {path: mistral}\nplugins: {modules: [house_mistral]}\ndata: {path: train.jsonl}\n"
        "reward: {name: math}\nrollout: {num_rollouts: 1, batch_size: 4, samples_per_prompt: 2}\n"
    )
    with pytest.raises(ConfigError, match=r"recipe 'house-mistral' cannot read .* sliding_window = 16, expected null"):
        make_plan(load_config(tmp_path / "run.yaml"))
