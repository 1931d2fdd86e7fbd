from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

BASE = """\
model: {path: model}
data: {path: train.jsonl}
rollout:
  num_rollouts: 10
  batch_size: 8
  samples_per_prompt: 4
reward: {name: toy_match}
algorithm: {name: toy}
transport: {name: toy_near}
plugins: {modules: [toy_parts]}
"""
"""A run config that can be planned; 10 lines."""


def lay_out(folder: Path) -> Path:
    """Write a run config, its model's config.json, three rows of data and the toy plugin."""
    shutil.copy(Path(__file__).parent / "toy_parts.py", folder)
    for name, architecture in (("model", "ToyForCausalLM"), ("full", "FullForCausalLM")):
        (folder / name).mkdir()
        config = {"architectures": [architecture], "hidden_size": 64}
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = "".join(json.dumps({"prompt": f"{i}?", "label": str(i)}) + "\n" for i in range(20))
    (folder / "train.jsonl").write_text(rows + "\n", encoding="utf-8")
    (folder / "run.yaml").write_text(BASE, encoding="utf-8")
    return folder


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with everything a plan needs, the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    return lay_out(tmp_path)
