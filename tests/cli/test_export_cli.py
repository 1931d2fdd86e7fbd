"""`milepost export`: what transformers loads from the folder is what was trained, bit for bit."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from milepost import loop
from milepost.cli import cli
from milepost.config.loading import load_config
from milepost.config.plan import make_plan
from milepost.tokenizer import load_tokenizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

Write = Callable[..., Path]


def export(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["export", *map(str, arguments)])


@pytest.fixture
def run_dir(write_config: Write) -> Path:
    path = write_config(rollout={"num_rollouts": 2}, eval={"datasets": [], "interval": None})
    return loop.train(make_plan(load_config(path)), progress=False).run_dir


def trained(run_dir: Path, rollout: int) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "checkpoints" / f"rollout-{rollout:06d}" / "trainer" / "actor.safetensors")


def test_the_folder_loads_with_the_trained_weights(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = export(run_dir, out)
    assert done.exit_code == 0, done.output
    assert f"{out}: " in done.output
    expected = trained(run_dir, 1)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(out)
    loaded = dict(model.named_parameters())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    assert not all(torch.equal(p, loaded[name]) for name, p in base.named_parameters())
    # tied weights are one tensor, in memory and in the file
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in load_file(out / "model.safetensors")
    # the rest is the starting model's
    assert AutoTokenizer.from_pretrained(out).get_vocab() == load_tokenizer(tmp_path / "model").backend.get_vocab()
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "model" / "tokenizer.json").read_bytes()
    assert GenerationConfig.from_pretrained(out) == GenerationConfig.from_pretrained(tmp_path / "model")
    assert json.loads((out / "config.json").read_text())["dtype"] == "float32"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".out")] == []


def test_an_earlier_checkpoint_can_be_named(run_dir: Path, tmp_path: Path) -> None:
    assert export(run_dir, tmp_path / "first", "--checkpoint", 0).exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    expected = trained(run_dir, 0)
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())
    done = export(run_dir, tmp_path / "other", "--checkpoint", 7)
    assert (done.exit_code, done.stderr) == (2, f"error: {run_dir} has no checkpoint of rollout 7; it has 0, 1\n")


def test_weights_trained_in_bfloat16_are_exported_in_bfloat16(write_config: Write, tmp_path: Path) -> None:
    path = write_config(
        model={"dtype": "bfloat16"}, rollout={"num_rollouts": 1}, eval={"datasets": [], "interval": None}
    )
    run_dir = loop.train(make_plan(load_config(path)), progress=False).run_dir
    assert export(run_dir, tmp_path / "out").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    expected = trained(run_dir, 0)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16} == {t.dtype for t in expected.values()}
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


def test_what_is_there_is_not_overwritten_unless_it_is_a_model_and_forced(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert export(run_dir, out).exit_code == 0  # an empty folder is in nobody's way
    (out / "old.txt").write_text("old")
    done = export(run_dir, out)
    assert done.exit_code == 2
    assert "is not empty; give another folder, or --force" in done.stderr
    assert export(run_dir, out, "--force").exit_code == 0
    assert not (out / "old.txt").exists()
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("dear")
    done = export(run_dir, home, "--force")
    assert done.exit_code == 2
    assert "is no model folder and --force does not replace it" in done.stderr
    assert [file.name for file in home.iterdir()] == ["thesis.tex"]


def test_what_cannot_be_exported_leaves_nothing_behind(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    cases = [
        ((tmp_path,), "is no run folder: it has no config.yaml"),
        ((run_dir, "--model", tmp_path / "moved"), "give its folder with --model"),
    ]
    for (folder, *more), message in cases:
        done = export(folder, out, *more)
        assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    other = tmp_path / "other"
    shutil.copytree((tmp_path / "model").resolve(), other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1, "layer_types": None}))
    assert "is not of the model at" in export(run_dir, out, "--model", other).stderr
    actor = run_dir / "checkpoints" / "rollout-000001" / "trainer" / "actor.safetensors"
    tensors = load_file(actor)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, actor)
    done = export(run_dir, out)
    assert done.exit_code == 2
    assert "SHA-256" in done.stderr
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))
