"""The weights of a Hugging Face folder as Megatron's distributed format (torch_dist), and back, bit for bit.

All ranks of the default process group take part, each with an equal share of the layers, so that together they hold
the weights once; only what a rank holds is read. Alone, a process holds them all. `milepost.conversion` starts the
ranks and keeps the books.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from safetensors.torch import save_file
from torch import Tensor

from milepost.errors import CheckpointError, MilepostError
from milepost.recipe import MegatronHalf, MegatronModel
from milepost.training.megatron import parallel
from milepost.training.megatron.model import PolicyModel, build_pieces, load_hf, rules_by_name, transformer_config
from milepost.training.megatron.parallel import Parallelism
from milepost.training.megatron.source import MegatronSource
from milepost.weights.files import INDEX, SINGLE, HFCheckpoint

MAX_FILE_BYTES = 4 << 30
"""Size above which another safetensors file is begun."""

Progress = Callable[[int], object]
"""Is told the bytes of weights that were dealt with since the last call."""


def _silent(num_bytes: int) -> None:
    """Tell nobody."""


def write_megatron(folder: Path, out: Path, half: MegatronHalf, progress: Progress = _silent) -> int:
    """Write the weights of the Hugging Face folder `folder` into the empty folder `out`, in their dtype.

    Called on all ranks of the default process group; without one, this process is the only rank. Returns the number of
    tensors; tied ones count once.

    Raises:
        ValueError: the recipe does not understand `config.json`, or the layers cannot be shared by the ranks.
        CheckpointError: the folder is not whole, or has weights in several dtypes.
    """
    if find_spec("psutil") is None:
        # Megatron's writer processes would die without it, and the ranks wait for them for ever.
        raise MilepostError("converting needs psutil, which is not installed here; pip install 'milepost[megatron]'")
    description = describe(folder, half)
    dtype = _dtype(folder)
    with _model(description, dtype) as pieces:
        load_hf(pieces, description, folder, lambda tensor: progress(tensor.nbytes))
        dist_checkpointing.save(_sharded(pieces), str(out))
        dist.barrier()
    return sum(len(rule.parts) for rule in rules_by_name(description).values())


def write_hf(
    weights: Path, config: Path, out: Path, half: MegatronHalf, progress: Progress = _silent
) -> tuple[int, str]:
    """Write weights in torch_dist, saved under whatever layout, as safetensors files into the folder `out`.

    Called on all ranks, as `write_megatron`; at most `MAX_FILE_BYTES` and a tensor are held beside the model.

    Args:
        weights: the folder in Megatron's format; optimizer state in it is not read.
        config: a folder with the model's `config.json`.
        out: an existing folder.
        half: the model's recipe.
        progress: is told of every tensor.

    Returns:
        The number of tensors (tied ones count once), and their dtype.

    Raises:
        ValueError: the recipe does not understand `config.json`, or the layers cannot be shared by the ranks.
        CheckpointError: the weights are of another model.
    """
    description = describe(config, half)
    dtype = _stored_dtype(weights)
    with _model(description, dtype) as pieces:
        load_torch_dist(pieces, weights)
        source = MegatronSource(pieces, description, dtype)
        _write(source, out, progress)
        return len(source.specs()), str(dtype).removeprefix("torch.")


@torch.no_grad()
def load_torch_dist(pieces: Sequence[PolicyModel], folder: Path) -> None:
    """Fill this rank's pieces from weights in torch_dist, of whatever layout and dtype; called on all ranks.

    A critic's value head stays what it is. Raises CheckpointError if the weights are of another model.
    """
    state = _sharded(pieces)
    if pieces[0].value_head:
        state = {
            key: {name: part for name, part in held.items() if not name.startswith("output_layer.")}
            for key, held in state.items()
        }
    try:
        loaded = dist_checkpointing.load(state, str(folder))
        for key, piece in zip(state, pieces, strict=True):
            piece.load_state_dict(loaded[key], strict=not piece.value_head)
    except (CheckpointingException, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{folder} has no weights of this model: {error}") from error


def describe(folder: Path, half: MegatronHalf) -> MegatronModel:
    """Read a folder's `config.json`. Raises ValueError naming what the recipe does not understand."""
    return half.describe(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def _dtype(folder: Path) -> torch.dtype:
    """Return the dtype that all weights of a Hugging Face folder have."""
    checkpoint = HFCheckpoint(folder)
    by_dtype: dict[torch.dtype, str] = {}
    for name in checkpoint.names:
        empty = [(0, 0)] * len(checkpoint.shape(name))
        by_dtype.setdefault(checkpoint.read(name, empty).dtype, name)
    if len(by_dtype) != 1:
        listing = ", ".join(f"{name} in {str(dtype).removeprefix('torch.')}" for dtype, name in by_dtype.items())
        raise CheckpointError(
            f"{folder} has weights in {len(by_dtype)} dtypes ({listing}), and Megatron keeps a model in one; "
            "cast them, or train straight from this folder, which casts"
        )
    return next(iter(by_dtype))


def _stored_dtype(folder: Path) -> torch.dtype:
    """Return the dtype of the weights in a folder of Megatron's format."""
    try:
        stored = dist_checkpointing.load_tensors_metadata(str(folder))
    except (CheckpointingException, OSError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    name = "embedding.word_embeddings.weight"
    if name not in stored:
        raise CheckpointError(f"{folder} has no {name}; is it a policy that Megatron saved?")
    dtype: torch.dtype = stored[name].dtype
    return dtype


@contextmanager
def _model(description: MegatronModel, dtype: torch.dtype) -> Iterator[list[PolicyModel]]:
    """Build this rank's layers, empty, on the CPU, and forget Megatron's groups at the end."""
    alone = not dist.is_initialized()
    parallel.ensure_process_group(torch.device("cpu"))
    try:
        layers, ranks = description.transformer["num_layers"], dist.get_world_size()
        if layers % ranks:
            divisors = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
            raise ValueError(f"{layers} layers cannot be shared equally by {ranks} workers; choose one of {divisors}")
        parallelism = Parallelism(pipeline=ranks)
        parallel.initialize(parallelism, seed=0)
        try:
            cpu = torch.device("cpu")
            config = transformer_config(description, parallelism, dtype=dtype, device=cpu)
            yield build_pieces(description, config, critic=False, seed=0, device=cpu)
        finally:
            parallel.destroy()
    finally:
        if alone:
            dist.destroy_process_group()


def _sharded(pieces: Sequence[PolicyModel]) -> dict[str, Any]:
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    return {f"model{i}": piece.sharded_state_dict(metadata=metadata) for i, piece in enumerate(pieces)}


def _write(source: MegatronSource, out: Path, progress: Progress) -> None:
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
    first = dist.get_rank() == 0
    for names, file in zip(groups, files, strict=True):
        held: dict[str, Tensor] = {}
        for name in names:
            # All ranks gather, one writes.
            _, tensor = next(tensors)
            if first:
                held[name] = tensor.contiguous()
                progress(tensor.nbytes)
        if first:
            save_file(held, out / file, {"format": "pt"})
    if first and count > 1:
        places = {name: file for names, file in zip(groups, files, strict=True) for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (out / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    dist.barrier()
