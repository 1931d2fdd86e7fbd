"""A trained policy as a Hugging Face folder, made from a run's checkpoint.

Weights are those of the checkpoint, bit for bit and in its dtype, under the names and in the layout that transformers
gives this architecture; everything else (config, tokenizer, generation config) is the starting model's.
"""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from milepost.checkpoint import CheckpointStore, load_tensors, verify
from milepost.errors import CheckpointError, MilepostError

if TYPE_CHECKING:
    from torch import Tensor

ACTOR = Path("trainer") / "actor.safetensors"
"""Where a checkpoint of the torch trainer keeps the policy's weights."""
ACTOR_SHARDS = Path("trainer") / "actor"
"""Where one of the Megatron trainer keeps them, in torch_dist."""

WEIGHT_SUFFIXES = frozenset(
    {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite", ".npz"}
)
"""Files of the starting model that are weights, and so not copied."""
NOT_COPIED = frozenset({"config.json", "readme.md"})
"""What is written anew, or is about the starting model alone."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote."""

    folder: Path
    checkpoint: Path
    num_tensors: int
    """Trained tensors; tied weights count once."""
    num_bytes: int
    """Size of all files."""
    dtype: str

    def __str__(self) -> str:
        size = f"{self.num_bytes / 1e6:.1f} MB"
        return f"{self.folder}: {self.num_tensors} tensors in {self.dtype}, {size}, from {self.checkpoint}"


def export(
    run_dir: Path, out: Path, *, checkpoint: int | None = None, model: Path | None = None, force: bool = False
) -> Exported:
    """Write a run's policy to the folder `out`, which `AutoModelForCausalLM.from_pretrained` loads.

    The folder appears whole or not at all. A checkpoint of the Megatron trainer is read in this process alone, whatever
    layout wrote it; the model's recipe is one of the plugins that the run used.

    Args:
        run_dir: the run folder.
        out: the folder to make.
        checkpoint: the rollout whose checkpoint is meant; default the last one.
        model: the model the run started from, where it no longer lies where the run found it.
        force: replace `out` if it is a model folder.

    Raises:
        CheckpointError: if there is no such checkpoint, it is damaged, or it is of another model.
        MilepostError: if `out` is in the way, or the starting model cannot be found.
    """
    config = read_run_config(run_dir)
    found = find_checkpoint(run_dir, checkpoint)
    base = Path(config["model"]["path"]) if model is None else model
    if not (base / "config.json").is_file():
        raise MilepostError(
            f"the model that {run_dir} started from is not at {base} (no config.json there); its config and tokenizer "
            "are part of an export: give its folder with --model"
        )
    check_target(out, force, is_model=lambda: (out / "config.json").is_file())
    verify(found)
    with replacing(out) as draft:
        if (found / ACTOR_SHARDS).is_dir():
            num_tensors, dtype = _write_shards(draft, base, found / ACTOR_SHARDS, config)
        else:
            weights = load_tensors(_actor(found))
            num_tensors = len(weights)
            dtype = _write_weights(draft, base, weights, remote_code=config["model"]["trust_remote_code"])
        _write_config(draft, base, dtype)
        _copy_rest(draft, base)
        for file in draft.glob("*.safetensors"):
            shutil.copymode(draft / "config.json", file)  # safetensors makes files that nobody else may read
        num_bytes = sum(file.stat().st_size for file in draft.iterdir() if file.is_file())
    return Exported(out, found, num_tensors, num_bytes, dtype)


def read_run_config(run_dir: Path) -> dict[str, Any]:
    """Return the resolved run config of a run folder. Raises CheckpointError if it is none."""
    file = run_dir / "config.yaml"
    if not file.is_file():
        raise CheckpointError(f"{run_dir} is no run folder: it has no config.yaml; give the run.dir of a training run")
    config: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8"))
    return config


def find_checkpoint(run_dir: Path, rollout: int | None = None) -> Path:
    """Return a run's checkpoint of this rollout, by default the last. Raises CheckpointError, listing those it has."""
    store = CheckpointStore(run_dir, keep=1)
    latest = store.latest()
    if latest is None:
        raise CheckpointError(
            f"{run_dir} has no complete checkpoint; one is made every checkpoint.save_interval rollouts and at the end"
        )
    if rollout is None:
        return latest
    wanted = store.folder / f"rollout-{rollout:06d}"
    if wanted not in store.all():
        names = ", ".join(str(int(folder.name.removeprefix("rollout-"))) for folder in store.all())
        raise CheckpointError(f"{run_dir} has no checkpoint of rollout {rollout}; it has {names}")
    return wanted


def _actor(checkpoint: Path) -> Path:
    file = checkpoint / ACTOR
    if not file.is_file():
        raise CheckpointError(
            f"{checkpoint} has neither {ACTOR} nor {ACTOR_SHARDS}, where the torch and Megatron trainers keep a policy"
        )
    return file


def check_target(out: Path, force: bool, *, is_model: Callable[[], bool]) -> None:
    """Raise MilepostError if `out` is in the way: not empty, unless it is a model folder that is to be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not out.is_dir():
        raise MilepostError(f"{out} is a file; give a folder that does not exist yet")
    if not force:
        raise MilepostError(f"{out} is not empty; give another folder, or --force to replace a model folder")
    if not is_model():
        raise MilepostError(f"{out} has no config.json, so it is no model folder and --force does not replace it")


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """Give a folder to fill that takes the place of `out` when the block ends well."""
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.partial-{os.getpid()}")
    before = out.with_name(f".{out.name}.replaced-{os.getpid()}")
    draft.mkdir()
    try:
        yield draft
        if out.exists():
            out.rename(before)
        draft.rename(out)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        if before.exists() and not out.exists():
            before.rename(out)
        raise
    if before.exists():
        shutil.rmtree(before)


def _write_shards(draft: Path, base: Path, shards: Path, config: Mapping[str, Any]) -> tuple[int, str]:
    """Write weights that the Megatron trainer saved; return the number of tensors, and their dtype."""
    from milepost.config.schema import RunConfig
    from milepost.recipe import Recipe
    from milepost.registry import Registry

    plugins, section = RunConfig.model_validate(config).plugins, config["model"]
    # The run config's folder is not written down, so hook modules are looked for where the command is typed.
    registry = Registry.load(block=plugins.block, modules=plugins.modules)
    architectures = json.loads((base / "config.json").read_text(encoding="utf-8"))["architectures"]
    name = registry.for_architecture(architectures[0], section["recipe"]).name
    recipe: Recipe = registry.resolve("model", name)
    if recipe.megatron is None:
        raise CheckpointError(
            f"{shards} was saved by the Megatron trainer, and recipe {name!r} has no Megatron half to read it; if the "
            "run used a hook module of its own (plugins.modules), export in the folder where it lies"
        )
    from milepost.training.megatron.convert import write_hf

    try:
        return write_hf(shards, base, draft, recipe.megatron)
    except ValueError as error:
        raise CheckpointError(f"{shards}: {error}") from error


def _write_weights(draft: Path, base: Path, weights: Mapping[str, Tensor], *, remote_code: bool) -> str:
    """Write the weights as transformers stores this architecture; return their dtype.

    The model is built without memory of its own and takes the checkpoint's tensors in, so nothing is cast or copied.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base, trust_remote_code=remote_code, local_files_only=True)
    sizes: Counter[torch.dtype] = Counter()
    for tensor in weights.values():
        sizes[tensor.dtype] += tensor.numel()
    ((dtype, _),) = sizes.most_common(1)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=remote_code)
    trained = {name for name, _ in model.named_parameters()}
    if trained != weights.keys():
        listing = ", ".join(sorted(trained ^ weights.keys())[:3])
        raise CheckpointError(
            f"the checkpoint is not of the model at {base} (tensors in only one of the two: {listing}); "
            "give the model the run started from with --model"
        )
    try:
        model.load_state_dict(dict(weights), strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"the checkpoint is not of the model at {base}: {error}") from error
    model.tie_weights()
    if unset := [name for name, buffer in model.state_dict().items() if buffer.is_meta]:
        raise CheckpointError(f"the checkpoint lacks {', '.join(unset[:3])}, which {type(model).__name__} stores")
    model.save_pretrained(draft)
    return str(dtype).removeprefix("torch.")


def _write_config(draft: Path, base: Path, dtype: str) -> None:
    """Write the starting model's config with the dtype of the trained weights, and nothing else changed."""
    config: dict[str, Any] = json.loads((base / "config.json").read_text(encoding="utf-8"))
    # transformers 5 writes `dtype` and reads both; other programs read what they find.
    for key in [key for key in ("dtype", "torch_dtype") if key in config] or ["dtype"]:
        config[key] = dtype
    (draft / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _copy_rest(draft: Path, base: Path) -> None:
    """Copy tokenizer, chat template, generation config, licence and code of the starting model as they are."""
    for file in sorted(base.iterdir()):
        index = file.name.endswith(".index.json")
        skipped = file.name.startswith(".") or file.name.lower() in NOT_COPIED or file.suffix in WEIGHT_SUFFIXES
        if file.is_file() and not index and not skipped:
            shutil.copyfile(file, draft / file.name)
