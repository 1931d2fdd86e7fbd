"""Model folders with something missing or broken: one message that names the file, and no values drawn at random."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from milepost.config.schema import DatasetFields
from milepost.data import load_dataset
from milepost.errors import CheckpointError, ConfigError, DataError
from milepost.tokenizer import load_tokenizer
from milepost.tracking.records import LineFile, read_lines
from milepost.weights.hf import load_causal_lm


@pytest.fixture
def model(policy: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(policy / "model", tmp_path / "own"))


def load(model: Path) -> None:
    load_causal_lm(model, torch.float32, torch.device("cpu"))


def reconfigure(model: Path, **values: int) -> None:
    config = json.loads((model / "config.json").read_text())
    config.pop("layer_types", None)
    (model / "config.json").write_text(json.dumps(config | values))


def test_a_whole_checkpoint_loads(model: Path) -> None:
    load(model)


def test_missing_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"the weights in .*/own cannot be read: .*model\.safetensors"):
        load(model)


def test_truncated_weights(model: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(CheckpointError, match=r"the weights in .*/own cannot be read: .*copy the checkpoint anew"):
        load(model)


def test_weights_of_another_shape(model: Path) -> None:
    reconfigure(model, intermediate_size=96)
    expected = r"6 tensors have other shapes .*'model.layers.0.mlp.down_proj.weight': \[32, 64\] stored, \[32, 96\] exp"
    with pytest.raises(CheckpointError, match=expected):
        load(model)


def test_a_layer_that_the_weights_lack_is_not_made_up(model: Path) -> None:
    reconfigure(model, num_hidden_layers=3)
    with pytest.raises(CheckpointError, match=r"lacks 11 of the model's tensors, the first is 'model.layers.2"):
        load(model)


def test_a_tokenizer_without_a_vocabulary(model: Path) -> None:
    for file in model.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ConfigError, match=r"model.path: the tokenizer in .*/own has no vocabulary; expected tokenizer"):
        load_tokenizer(model)


def test_half_of_a_surrogate_pair_in_a_prompt_is_named_with_its_line(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "label": "2"}\n{"prompt": "\\ud83d", "label": "2"}\n')
    with pytest.raises(DataError, match=r"rows.jsonl:2: the prompt has half of a surrogate pair \(U\+D83D\)"):
        load_dataset(rows, DatasetFields(), load_tokenizer(model))


def test_half_of_a_surrogate_pair_in_a_label_is_kept(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "samples.jsonl")
    file.append({"label": "\ud83d", "text": "ü"})
    file.close()
    assert file.path.read_bytes() == b'{"label": "\\ud83d", "text": "\xc3\xbc"}\n'
    assert list(read_lines(file.path)) == [{"label": "\ud83d", "text": "ü"}]
