"""A Hugging Face folder as a Megatron checkpoint (torch_dist), and back, bit for bit.

All ranks of the default process group take part, each with an equal share of the layers, so that together they hold the
weights once; only what a rank holds is read. Alone, a process holds them all.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from safetensors.torch import save_file

from milepost.errors import CheckpointError
from milepost.recipe import MegatronHalf, MegatronModel
from milepost.training.megatron import parallel
from milepost.training.megatron.model import PolicyModel, build_pieces, load_hf, transformer_config
from milepost.training.megatron.parallel import Parallelism
from milepost.training.megatron.source import MegatronSource
from milepost.weights.files import INDEX, SINGLE, HFCheckpoint

RECORD = "milepost-conversion.json"
"""Written last, into a whole conversion: what it was made of."""
HF = "hf"
"""Folder of a conversion that keeps what a Hugging Face folder has beside weights."""
WEIGHTS = "weights"
"""Folder of a conversion with the weights."""
MAX_FILE_BYTES = 4 << 30
"""Size above which another safetensors file is begun."""


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion came to."""

    folder: Path
    num_tensors: int
    skipped: bool
    """The folder was already the conversion of this very input."""


def fingerprint(folder: Path) -> str:
    """Return the SHA-256 over `config.json` and the weight files of a Hugging Face folder, names included."""
    files = sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob(INDEX)])

    def digest(file: Path) -> str:
        with file.open("rb") as stream:
            return f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n"

    with ThreadPoolExecutor(8) as pool:
        return hashlib.sha256("".join(pool.map(digest, files)).encode()).hexdigest()


def hf_to_megatron(folder: Path, out: Path, half: MegatronHalf) -> Converted:
    """Write the Hugging Face folder `folder` as a Megatron checkpoint `out`, unless it is that already.

    Called on all ranks. Weights keep their dtype.

    Raises:
        ValueError: the recipe does not understand `config.json`, or the layers cannot be shared by the ranks.
        CheckpointError: the folder is not whole, or `out` is in the way.
    """
    parallel.ensure_process_group(torch.device("cpu"))
    mark = _on_first(lambda: fingerprint(folder))
    record = out / RECORD
    if record.is_file() and (found := json.loads(record.read_text(encoding="utf-8")))["fingerprint"] == mark:
        return Converted(out, found["num_tensors"], skipped=True)
    if out.exists() and not record.is_file() and any(out.iterdir()):
        raise CheckpointError(f"{out} is there and is no conversion; remove it, or give another folder")
    dtype = HFCheckpoint(folder).read("model.embed_tokens.weight", ((0, 1), (0, 1))).dtype
    description, pieces = _build(folder, half, dtype)
    try:
        load_hf(pieces, description, folder)
        count = len(MegatronSource(pieces, description, dtype).specs())
        _on_first(lambda: _begin(folder, out))
        dist_checkpointing.save(_sharded(pieces), str(out / WEIGHTS))
        entry = {"fingerprint": mark, "num_tensors": count, "dtype": str(dtype).removeprefix("torch.")}
        _on_first(lambda: record.write_text(json.dumps(entry, indent=1) + "\n", encoding="utf-8"))
    finally:
        parallel.destroy()
    return Converted(out, count, skipped=False)


def megatron_to_hf(folder: Path, out: Path, half: MegatronHalf) -> Converted:
    """Write what `hf_to_megatron` wrote as a Hugging Face folder again; called on all ranks.

    Raises CheckpointError if `folder` is no whole conversion, or `out` is in the way.
    """
    parallel.ensure_process_group(torch.device("cpu"))
    record = folder / RECORD
    if not record.is_file():
        raise CheckpointError(f"{folder} is no whole conversion ({RECORD} is missing); make it anew")
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; give another folder")
    dtype = getattr(torch, json.loads(record.read_text(encoding="utf-8"))["dtype"])
    description, pieces = _build(folder / HF, half, dtype)
    try:
        loaded = dist_checkpointing.load(_sharded(pieces), str(folder / WEIGHTS))
        pieces[0].load_state_dict(loaded["model"])
        source = MegatronSource(pieces, description, dtype)
        _on_first(lambda: shutil.copytree(folder / HF, out, dirs_exist_ok=True))
        _write(source, out)
    finally:
        parallel.destroy()
    return Converted(out, len(source.specs()), skipped=False)


def _build(folder: Path, half: MegatronHalf, dtype: torch.dtype) -> tuple[MegatronModel, list[PolicyModel]]:
    """Build this rank's layers, empty, on the CPU."""
    description = half.describe(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    layers, ranks = description.transformer["num_layers"], dist.get_world_size()
    if layers % ranks:
        raise ValueError(f"{layers} layers cannot be shared equally by {ranks} processes; choose a divisor")
    parallelism = Parallelism(pipeline=ranks)
    parallel.initialize(parallelism, seed=0)
    cpu = torch.device("cpu")
    config = transformer_config(description, parallelism, dtype=dtype, device=cpu)
    return description, build_pieces(description, config, critic=False, seed=0, device=cpu)


def _sharded(pieces: list[PolicyModel]) -> dict[str, Any]:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {"model": pieces[0].sharded_state_dict(metadata=metadata)}


def _begin(folder: Path, out: Path) -> None:
    """Make an empty conversion that keeps config and tokenizer."""
    if out.exists():
        shutil.rmtree(out)
    (out / WEIGHTS).mkdir(parents=True)
    (out / HF).mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX:
            shutil.copy2(file, out / HF)


def _write(source: MegatronSource, out: Path) -> None:
    """Write the source's tensors as safetensors files of bounded size, holding one file's at a time."""
    groups: list[list[str]] = [[]]
    size = total = 0
    for spec in source.specs():
        if groups[-1] and size + spec.num_bytes > MAX_FILE_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(spec.name)
        size += spec.num_bytes
        total += spec.num_bytes
    count = len(groups)
    files = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    tensors = source.tensors()
    for names, file in zip(groups, files, strict=True):
        held = {name: tensor for name, (_, tensor) in zip(names, tensors, strict=False)}
        if dist.get_rank() == 0:
            save_file({name: tensor.contiguous() for name, tensor in held.items()}, out / file, {"format": "pt"})
    if dist.get_rank() == 0 and count > 1:
        places = {name: file for names, file in zip(groups, files, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (out / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    dist.barrier()


def _on_first(call: Any) -> Any:
    """Call on the first rank alone, and return to all what it returned."""
    box = [call() if dist.get_rank() == 0 else None]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]
