import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from milepost.checkpoint import (
    CheckpointStore,
    load_metadata,
    load_tensors,
    read_state,
    save_tensors,
    verify,
    write_state,
)
from milepost.errors import CheckpointError


def save(store, rollout, mark=0):
    with store.saving(rollout) as folder:
        write_state(folder, {"mark": mark})
        (folder / "trainer").mkdir()
        save_tensors(folder / "trainer" / "actor.safetensors", {"w": torch.full((4,), float(mark))})


def names(store):
    return sorted(path.name for path in store.folder.iterdir())


def test_save_appears_whole_and_only_when_done(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    assert store.latest() is None
    assert store.all() == []
    with store.saving(20) as folder:
        (folder / "a").write_text("x")
        assert folder.name.startswith(".")
        assert store.latest() is None
    assert store.latest() == tmp_path / "checkpoints" / "rollout-000020"
    assert names(store) == ["rollout-000020"]
    verify(store.latest())


def test_keep_counts_the_newest_rollouts(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    for rollout in (5, 10, 999_999, 1_000_000):
        save(store, rollout)
    assert [path.name for path in store.all()] == ["rollout-999999", "rollout-1000000"]
    assert store.latest().name == "rollout-1000000"


def test_the_one_just_written_is_never_pruned(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 30)
    save(store, 10)
    assert names(store) == ["rollout-000010"]


def test_same_rollout_again_replaces_it(tmp_path):
    store = CheckpointStore(tmp_path, keep=3)
    save(store, 10, mark=1)
    save(store, 20, mark=2)
    save(store, 20, mark=3)
    assert names(store) == ["rollout-000010", "rollout-000020"]
    assert read_state(store.latest()) == {"mark": 3}


def test_a_save_that_raises_changes_nothing(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 10, mark=1)
    for error in (OSError("disk full"), KeyboardInterrupt()):
        with pytest.raises(type(error)), store.saving(20) as folder:
            (folder / "a").write_text("x")
            raise error
        assert names(store) == ["rollout-000010"]
        assert read_state(store.latest()) == {"mark": 1}


def test_folder_without_manifest_is_no_checkpoint(tmp_path):
    store = CheckpointStore(tmp_path, keep=2)
    save(store, 10)
    (store.folder / "rollout-000020").mkdir()
    (store.folder / "notes.txt").write_text("mine")
    assert store.latest().name == "rollout-000010"


KILLED_EVERYWHERE = r"""
import json, os, shutil, signal, sys
from pathlib import Path
from milepost.checkpoint import CheckpointStore, read_state, verify, write_state

root, second = Path(sys.argv[1]), int(sys.argv[2])
WATCHED = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}

def save(store, rollout, mark):
    with store.saving(rollout) as folder:
        (folder / "trainer").mkdir()
        (folder / "trainer" / "weights").write_text("w" * mark)
        write_state(folder, {"mark": mark})

def killed_save(store, at):
    # The child dies by SIGKILL right before its at-th change to the file system; returns whether it did.
    if (child := os.fork()) == 0:
        left = at
        def hook(event, args):
            nonlocal left
            if event in WATCHED:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        save(store, second, 3)
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])

def contents(store):
    for folder in store.all():
        verify(folder)
    return [read_state(folder)["mark"] for folder in store.all()]

seen, at, killed = [], 0, True
while killed:
    at += 1
    shutil.rmtree(root, ignore_errors=True)
    store = CheckpointStore(root, keep=2)
    save(store, 10, 1)
    save(store, 20, 2)
    killed = killed_save(store, at)
    seen.append(contents(store))
    save(store, 40, 4)
    after = sorted(path.name for path in store.folder.iterdir())
    assert len(after) == 2 and after[-1] == "rollout-000040", after
    assert contents(store)[-1] == 4
print(json.dumps([at, seen]))
"""


@pytest.mark.parametrize(
    ("second", "allowed"),
    [
        (30, [[1, 2], [1, 2, 3], [2, 3]]),  # 1, 2, 3 between the rename and the pruning
        (20, [[1, 2], [1, 3]]),  # the same rollout again: the old one until the new one stands
    ],
)
def test_killed_at_every_point_of_a_save(tmp_path, second, allowed):
    result = subprocess.run(
        [sys.executable, "-c", KILLED_EVERYWHERE, tmp_path / "run", str(second)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    points, seen = json.loads(result.stdout)
    assert points > 15
    assert {json.dumps(marks) for marks in seen} == {json.dumps(marks) for marks in allowed}


def test_damage_is_named(tmp_path):
    store = CheckpointStore(tmp_path, keep=1)
    save(store, 10, mark=1)
    folder = store.latest()
    verify(folder)
    weights = folder / "trainer" / "actor.safetensors"
    whole = weights.read_bytes()

    weights.write_bytes(whole[:-1])
    with pytest.raises(CheckpointError, match=rf"actor\.safetensors has {len(whole) - 1} bytes, expected {len(whole)}"):
        verify(folder)
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"actor\.safetensors has SHA-256"):
        verify(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"actor\.safetensors is missing"):
        verify(folder)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointError, match="lists no files"):
        verify(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        verify(folder)


def test_state_comes_back_exactly(tmp_path):
    rng = np.random.default_rng(5)
    state = {
        "float": 0.1 + 0.2,
        "tiny": 5e-324,
        "nan": math.nan,
        "inf": -math.inf,
        "f32": np.float32(0.1),
        "i64": np.int64(2**62),
        "flag": np.bool_(True),
        "array": np.array([1.5, 2.5]),
        "tuple": (1, "ü", None),
        "rng": rng.bit_generator.state,
    }
    write_state(tmp_path, state)
    back = read_state(tmp_path)
    assert math.isnan(back.pop("nan"))
    assert back.pop("rng") == rng.bit_generator.state
    assert back == {
        "float": 0.30000000000000004,
        "tiny": 5e-324,
        "inf": -math.inf,
        "f32": 0.10000000149011612,
        "i64": 2**62,
        "flag": True,
        "array": [1.5, 2.5],
        "tuple": [1, "ü", None],
    }


def test_state_refuses_what_json_would_change(tmp_path):
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\] is a Tensor.*save_tensors"):
        write_state(tmp_path, {"a": [1, torch.ones(1)]})
    with pytest.raises(TypeError, match=r"state\['a'\] has the key 3, expected texts"):
        write_state(tmp_path, {"a": {3: 1}})
    with pytest.raises(CheckpointError, match=r"state\.json is missing"):
        read_state(tmp_path)
    (tmp_path / "state.json").write_text('{"a": 1')
    with pytest.raises(CheckpointError, match=r"state\.json is no valid JSON"):
        read_state(tmp_path)


def test_tensors_come_back_bit_for_bit(tmp_path):
    tied = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    tensors = {
        "bf16": torch.tensor([1.5, -0.0, math.nan, math.inf], dtype=torch.bfloat16),
        "f64": torch.tensor([0.1, 5e-324], dtype=torch.float64),
        "step": torch.tensor(7.0),
        "count": torch.tensor(2**40),
        "mask": torch.tensor([True, False]),
        "rng": torch.get_rng_state(),
        "tied": tied,
        "tied_again": tied,
        "view": tied[1],
        "transposed": tied.t(),
        "empty": torch.zeros(0, 3),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    path = tmp_path / "t.safetensors"
    save_tensors(path, tensors, {"kind": "adam"})
    back = load_tensors(path)
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape), name
        if tensor.numel():
            expected = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            assert torch.equal(back[name].reshape(-1).view(torch.uint8), expected), name
    assert load_metadata(path) == {"kind": "adam"}


def test_damaged_tensors_are_a_checkpoint_error(tmp_path):
    path = tmp_path / "t.safetensors"
    with pytest.raises(CheckpointError, match=r"t\.safetensors is missing"):
        load_tensors(path)
    save_tensors(path, {"a": torch.ones(100)})
    assert load_metadata(path) == {}
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"t\.safetensors is no intact safetensors file"):
        load_tensors(path)
    with pytest.raises(CheckpointError, match=r"t\.safetensors is no intact safetensors file"):
        load_metadata(path)


def test_import_needs_neither_torch_nor_numpy():
    program = "import sys; import milepost.checkpoint; print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_numbers_out_of_range(tmp_path):
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointStore(tmp_path, keep=0)
    with pytest.raises(ValueError, match="rollout is -1"), CheckpointStore(tmp_path, keep=1).saving(-1):
        pass
    assert list(Path(tmp_path).iterdir()) == []
