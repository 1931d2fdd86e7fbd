"""Conversions between Hugging Face and Megatron: bit for bit, in parallel, and skipped where nothing changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from commands import Command
from megatron_cases import make_checkpoint
from megatron_world import run_world
from milepost.cli import cli
from milepost.config.converted import RECORD, conversion_problem
from safetensors.torch import load_file, save_file


def in_bfloat16(path: Path) -> dict[str, torch.Tensor]:
    """Cast a checkpoint, and return its weights."""
    saved = {name: tensor.bfloat16() for name, tensor in load_file(path / "model.safetensors").items()}
    save_file(saved, path / "model.safetensors", {"format": "pt"})
    return saved


def convert(rank: int, *calls: tuple[str, str, bool]) -> list[tuple[int, bool] | str]:
    """Convert from folder to folder, by force or not; (tensors, skipped) of each, or what was wrong."""
    from milepost import conversion
    from milepost.errors import MilepostError
    from milepost.registry import Registry

    results: list[tuple[int, bool] | str] = []
    for source, out, force in calls:
        try:
            done = conversion.convert(Path(source), Path(out), Registry.load(), force=force, progress=False)
            results.append((done.num_tensors, done.skipped))
        except MilepostError as error:
            results.append(str(error))
    return results


def in_parts(rank: int, folder: str, out: str, limit: int) -> int:
    """Write a converted folder's weights into files of at most so many bytes; called on all ranks."""
    from milepost.training.megatron import convert as ranks
    from milepost_qwen3.recipe import Qwen3Recipe

    ranks.MAX_FILE_BYTES = limit
    source = Path(folder)
    return ranks.write_hf(source / "weights", source / "hf", Path(out), Qwen3Recipe().megatron)[0]


@pytest.mark.parametrize(("architecture", "tied"), [("qwen3", True), ("llama", False)])
def test_there_and_back_is_exact_and_done_once(tmp_path: Path, architecture: str, tied: bool) -> None:
    path = make_checkpoint(tmp_path / "model", architecture, tied=tied)
    saved = in_bfloat16(path)
    (path / "tokenizer.json").write_text("{}")
    count = len(saved)
    model, there, back = str(path), str(tmp_path / "there"), str(tmp_path / "back")
    calls = [(model, there, False), (model, there, False), (there, back, False), (there, back, False)]
    found = run_world(convert, 1, *calls, (model, there, True))[0]
    assert found == [(count, False), (count, True), (count, False), (count, True), (count, False)]
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()
    for name in ("tokenizer.json", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (path / name).read_bytes()

    # A change of the input, be it of a file beside the weights, is converted again; of several dtypes, it is refused.
    (path / "tokenizer.json").write_text("{ }")
    mixed = make_checkpoint(tmp_path / "mixed", architecture, tied=tied)
    save_file(saved | {"model.norm.weight": saved["model.norm.weight"].float()}, mixed / "model.safetensors")
    found = run_world(convert, 1, (model, there, False), (str(mixed), str(tmp_path / "none"), False))[0]
    assert found[0] == (count, False)
    assert "has weights in 2 dtypes" in found[1]
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"model", "there", "back", "mixed"}


def test_workers_share_the_layers(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    saved = in_bfloat16(path)
    done = milepost(path, tmp_path / "there", "--workers", 2, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    assert (told["format"], told["num_tensors"], told["skipped"]) == ("torch_dist", len(saved), False)
    (tmp_path / "parts").mkdir()
    assert run_world(in_parts, 2, told["folder"], str(tmp_path / "parts"), 20_000) == [len(saved)] * 2
    files = sorted((tmp_path / "parts").glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert len(files) > 2
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)


def milepost(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["convert", *map(str, arguments)])


def test_what_cannot_be_converted_is_said_and_left_alone(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("dear")
    cases = [
        ((home, tmp_path / "out"), "has no config.json; expected a Hugging Face folder"),
        ((path, home), "is not empty"),
        ((path, home, "--force"), "is no model folder and --force does not replace it"),
        ((path, path), "is the input; give another folder"),
        ((path, tmp_path / "out", "--recipe", "qwen9"), "unknown model 'qwen9'"),
    ]
    for arguments, message in cases:
        done = milepost(*arguments)
        assert (done.exit_code, message in done.stderr) == (2, True), done.stderr
    assert [file.name for file in home.iterdir()] == ["thesis.tex"]
    assert {entry.name for entry in tmp_path.iterdir()} == {"model", "home"}


def starting_weights(rank: int, path: str, converted: str, section: dict[str, int]) -> None:
    """Save what actor and critic begin with when ranks read a converted folder."""
    from megatron_cases import CPU, Clip, make_plan
    from milepost.training.megatron.trainer import MegatronTrainer
    from milepost_qwen3.recipe import Qwen3Recipe

    model = {"path": path, "converted": converted}
    trainer = {"backend": "megatron", **section}
    plan = make_plan(Path(path), critic=True, world=2, model=model, trainer=trainer)
    made = MegatronTrainer(plan, recipe=Qwen3Recipe(), algorithm=Clip(), device=CPU, dtype=torch.float32)
    found = {f"{role}.{k}": v.clone() for role in ("actor", "critic") for k, v in made.source(role).tensors()}
    if rank == 0:
        save_file(found, Path(path) / "found.safetensors")


@pytest.mark.parametrize(("tied", "section"), [(True, {"pipeline_parallel": 2}), (False, {"tensor_parallel": 2})])
def test_ranks_start_from_a_converted_folder(tmp_path: Path, tied: bool, section: dict[str, int]) -> None:
    path = make_checkpoint(tmp_path / "model", tied=tied)
    saved = in_bfloat16(path)
    assert run_world(convert, 1, (str(path), str(tmp_path / "there"), False))[0] == [(len(saved), False)]
    (path / "model.safetensors").unlink()  # it is not read
    run_world(starting_weights, 2, str(path), str(tmp_path / "there"), section)
    found = load_file(path / "found.safetensors")
    body = {name for name in saved if name != "lm_head.weight"}
    expected = {f"actor.{name}" for name in saved} | {f"critic.{name}" for name in body}
    assert found.keys() == expected | {"critic.value_head.weight", "critic.value_head.bias"}
    for name in expected:
        assert torch.equal(found[name], saved[name.partition(".")[2]].float()), name


def test_prepare_converts_once_and_training_asks_for_it(write_config: Callable[..., Path], workspace: Path) -> None:
    path = write_config(model={"converted": "megatron"}, trainer={"backend": "megatron"}, cluster={"launcher": "ray"})
    shared = (workspace / "model").resolve()
    (workspace / "model").unlink()
    shutil.copytree(shared, workspace / "model")

    def said(*words: str) -> tuple[int, str]:
        return Command(*words[:1], path, *words[1:], cwd=workspace).finish()

    code, output = said("train")
    assert code == 2
    assert f"{workspace}/megatron is not there, or not what a conversion makes; milepost prepare makes it" in output
    code, output = said("prepare", "--no-score")
    assert (code, f"converted {workspace}/megatron: 24 tensors, " in output) == (0, True), output
    code, output = said("prepare", "--no-score")
    assert (code, "in torch_dist, up to date" in output) == (0, True), output
    record = workspace / "megatron" / RECORD
    os.utime(record, (0, 0))
    code, output = said("train")
    assert (code, f"{workspace}/megatron is older than model.safetensors in " in output) == (2, True), output
    # Of the same bytes, whatever the clock says: prepare sees that, and training goes by it.
    assert said("prepare", "--no-score")[0] == 0
    assert conversion_problem(workspace / "model", workspace / "megatron") is None
    code, output = said("plan", "--set", "trainer.backend=torch")
    assert code == 0, output
    assert "model.converted: has no effect: the torch backend reads the checkpoint itself" in output
