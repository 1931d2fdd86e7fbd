"""`milepost export` of a Megatron run: one process makes a Hugging Face folder of what any layout saved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from megatron_cases import make_checkpoint
from megatron_world import run_world
from test_megatron_resharding import LAYOUTS, make_trainer, steps


def train_and_save(rank: int, path: str, layout: str) -> None:
    """Two steps of actor and critic, and a checkpoint in a run folder."""
    import torch.distributed as dist
    from milepost.checkpoint import CheckpointStore

    folder = Path(path)
    trainer = make_trainer(folder / "model", layout, torch.bfloat16)
    steps(trainer, layout, 2)
    draft = [""]
    if rank == 0:
        saving = CheckpointStore(folder / "run", keep=1).saving(3)
        draft[0] = str(saving.__enter__())
        (Path(draft[0]) / "trainer").mkdir()
    dist.broadcast_object_list(draft, src=0)
    trainer.save(Path(draft[0]) / "trainer")
    found = {name: tensor.clone() for name, tensor in trainer.source("actor").tensors()}
    if rank == 0:
        saving.__exit__(None, None, None)
        config = trainer._plan.config.model_dump(mode="json")
        (folder / "run" / "config.yaml").write_text(yaml.safe_dump(config))
        torch.save(found, folder / "weights.pt")


def export(rank: int, path: str) -> tuple[int, str]:
    from milepost.export import export as write

    folder = Path(path)
    done = write(folder / "run", folder / "out", model=folder / "model")
    return done.num_tensors, done.dtype


@pytest.mark.parametrize(("layout", "tied"), [("tp2_sp", False), ("pp2_vpp2", True)])
def test_one_process_exports_what_any_layout_saved(tmp_path: Path, layout: str, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path / "model", tied=tied)
    run_world(train_and_save, LAYOUTS[layout][0], str(tmp_path), layout)
    expected = torch.load(tmp_path / "weights.pt")
    assert run_world(export, 1, str(tmp_path)) == [(len(expected), "bfloat16")]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded = dict(model.named_parameters())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    before = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).state_dict()
    assert not torch.equal(before["model.norm.weight"], loaded["model.norm.weight"])
