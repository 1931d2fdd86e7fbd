"""The torch trainer shared out over two ranks (FSDP2 on gloo) against one rank that holds everything."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

WORKER = Path(__file__).parent / "sharding_worker.py"
ROLES = ("actor", "critic")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that both ranks wrote to."""
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
        tie_word_embeddings=True,
    )
    model, folder = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("sharding")
    Qwen3ForCausalLM(config).save_pretrained(model)
    processes = [
        subprocess.Popen([sys.executable, str(WORKER), str(model), str(folder), str(rank)]) for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    return folder


def found(out: Path, rank: int) -> Any:
    return json.loads((out / f"rank-{rank}.json").read_text())


def weights(out: Path, name: str, role: str = "actor", rank: int = 0) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(out / f"{name}-{role}-{rank}.safetensors")
    return tensors


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


def assert_close(mine: dict[str, Tensor], theirs: dict[str, Tensor], since: dict[str, Tensor]) -> None:
    """What changed since then, by much more than that, differs by no more than 1e-6."""
    assert mine.keys() == theirs.keys()
    scale = max(float((theirs[name] - tensor).abs().max()) for name, tensor in since.items())
    assert scale > 1e-3
    for name, tensor in mine.items():
        assert float((tensor - theirs[name]).abs().max()) <= 1e-6, name


def test_each_rank_holds_half_of_the_parameters(out: Path) -> None:
    parts = [found(out, rank)["parts"] for rank in range(2)]
    # One vocabulary of 31 is cut into 16 and 15 rows, of 16 numbers each; all else is even.
    assert parts[0][0] - parts[1][0] == 16
    assert parts[0][0] + parts[1][0] == parts[0][1] == parts[1][1]


def test_steps_of_both_roles_are_one_ranks(out: Path) -> None:
    before = weights(out, "before-alone")
    for role in ROLES:
        since = {name: tensor for name, tensor in before.items() if role == "actor" or name.startswith("model.layers")}
        for rank in range(2):
            assert_close(weights(out, "after-both", role, rank), weights(out, "after-alone", role), since)


def test_metrics_are_those_of_one_rank_and_clipping_was_at_work(out: Path) -> None:
    for rank in range(2):
        both, alone = found(out, rank)["metrics-both"], found(out, 0)["metrics-alone"]
        for mine, theirs in zip(both, alone, strict=True):
            for role in ROLES:
                assert mine[role] == pytest.approx(theirs[role], rel=1e-4, abs=1e-6)
                assert theirs[role]["grad_norm"] > 0.05


def test_forward_passes_of_all_roles_fill_in_a_ranks_own_samples(out: Path) -> None:
    parts, alone = [found(out, rank)["forward-both"] for rank in range(2)], found(out, 0)["forward-alone"]
    for name in ("log_probs", "reference", "values"):
        first, second = (torch.tensor(part[name]) for part in parts)
        assert not ((first != 0) & (second != 0)).any()
        torch.testing.assert_close(first + second, torch.tensor(alone[name]), rtol=0, atol=2e-6)


def test_both_ranks_push_the_same_bytes_and_untrained_ones_are_the_models(out: Path) -> None:
    assert_equal(weights(out, "before-both", rank=0), weights(out, "before-alone"))
    for name, role in (("before-both", "actor"), ("after-both", "actor"), ("after-both", "critic")):
        assert_equal(weights(out, name, role, 0), weights(out, name, role, 1))


def test_shards_of_both_ranks_cover_every_tensor_once(out: Path) -> None:
    first, second = (found(out, rank)["shards"] for rank in range(2))
    whole = weights(out, "after-both")
    assert [entry[0] for entry in first] == [entry[0] for entry in second] == list(dict.fromkeys(e[0] for e in first))
    assert {entry[0] for entry in first} == whole.keys()
    for (name, shape, mine, view), (_, _, theirs, _) in zip(first, second, strict=True):
        assert shape == list(whole[name].shape)
        assert view == [stop - start for start, stop in mine]
        assert mine[0][0] == 0 and mine[0][1] == theirs[0][0] and theirs[0][1] == shape[0]


def test_a_resumed_run_goes_on_with_the_same_bits(out: Path) -> None:
    for role in ROLES:
        assert_equal(weights(out, "third-resumed", role), weights(out, "third-both", role))


def test_a_checkpoint_of_two_ranks_loads_at_one_and_the_other_way_round(out: Path) -> None:
    folders = (out / "saved-both", out / "saved-alone")
    names = [sorted(path.name for path in folder.iterdir()) for folder in folders]
    expected = [f"{role}{kind}.safetensors" for role in ROLES for kind in ("-optimizer", "")]
    assert names[0] == names[1] == sorted([*expected, "random.safetensors"])
    for name in expected:
        mine, theirs = (load_file(folder / name) for folder in folders)
        assert {k: (v.shape, v.dtype) for k, v in mine.items()} == {k: (v.shape, v.dtype) for k, v in theirs.items()}
    for role in ROLES:
        for name in ("third-gathered", "third-resharded"):
            mine, theirs = weights(out, name, role), weights(out, "third-alone", role)
            for key, tensor in mine.items():
                assert float((tensor - theirs[key]).abs().max()) <= 2e-6, (name, key)


def test_a_loss_that_is_not_finite_on_one_rank_is_skipped_by_both(out: Path) -> None:
    assert [found(out, rank)["skipped"] for rank in range(2)] == [True, True]
    for rank in range(2):
        assert_equal(weights(out, "skipped-both", rank=rank), weights(out, "third-both", rank=rank))


def test_bfloat16_is_pushed_and_float32_masters_survive_resharding(out: Path) -> None:
    low = weights(out, "low-both")
    assert {tensor.dtype for tensor in low.values()} == {torch.bfloat16}
    assert_equal(low, weights(out, "low-alone"))
    assert_equal(low, weights(out, "low-again"))
    states = [load_file(out / folder / "actor-optimizer.safetensors") for folder in ("saved-low", "saved-low-again")]
    assert_equal(*states)
    masters = {name.removeprefix("master."): t for name, t in states[0].items() if name.startswith("master.")}
    assert masters.keys() == low.keys()
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    assert_equal({name: master.bfloat16() for name, master in masters.items()}, low)
