"""Conversion between Hugging Face folders and Megatron's distributed format (torch_dist): `milepost convert`.

A converted folder is whole or absent. It holds `weights/` (torch_dist), `hf/` (what the Hugging Face folder has beside
weights) and a record of the input's fingerprint, by which a conversion that stands already is left alone.

Importing this imports no torch; the processes that convert do.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import queue
import shutil
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from milepost.config.converted import INDEX_SUFFIX, RECORD, WEIGHTS, is_converted, weight_files
from milepost.errors import CheckpointError, MilepostError
from milepost.export import WEIGHT_SUFFIXES, check_target, replacing
from milepost.registry import Registry

HF = "hf"
ALIVE_INTERVAL = 1.0
"""Seconds after which the parent looks whether its workers still live."""

Format = Literal["torch_dist", "hf"]


@dataclass(frozen=True, slots=True)
class Converted:
    """What a conversion came to."""

    folder: Path
    format: Format
    """What `folder` is in."""
    recipe: str
    num_tensors: int
    """Hugging Face tensors; tied ones count once."""
    num_bytes: int
    """Of all weights."""
    skipped: bool
    """The folder was already the conversion of this very input."""

    def __str__(self) -> str:
        what = f"{self.folder}: {self.num_tensors} tensors, {self.num_bytes / 1e6:.1f} MB, in {self.format}"
        return f"{what}, up to date" if self.skipped else what


@dataclass(frozen=True, slots=True)
class Job:
    """What the workers do; plain data, so that it reaches another process."""

    to: Format
    source: Path
    draft: Path
    recipe: str
    plugins: Mapping[str, Any]
    """Settings that make the registry again."""


def convert(
    source: Path,
    out: Path,
    registry: Registry,
    *,
    recipe: str | None = None,
    workers: int = 1,
    force: bool = False,
    progress: bool = True,
) -> Converted:
    """Write a Hugging Face folder as a converted folder, or a converted folder as a Hugging Face folder.

    The direction is the one that `source` has left. Weights keep their dtype, bit for bit.

    Args:
        source: a Hugging Face folder with safetensors files, or what this function made of one.
        out: the folder to make. A conversion of an earlier state of the source is replaced.
        registry: the plugins; one of them serves the model's architecture.
        recipe: name of the recipe, if not the one that serves the architecture.
        workers: processes that share the layers.
        force: convert also what is up to date, and replace `out` if it is another model folder.
        progress: show a bar on stderr.

    Raises:
        CheckpointError: the source is neither, is not whole, or a worker died.
        MilepostError: `out` is in the way.
        PluginError: no recipe serves the architecture, or it does not load.
    """
    to: Format = "hf" if is_converted(source) else "torch_dist"
    config = source / HF / "config.json" if to == "hf" else source / "config.json"
    name = registry.for_architecture(architecture(config), recipe).name
    stamp = {"format": to, "recipe": name, "fingerprint": fingerprint(source, to)}
    if not force and (made := _up_to_date(out, stamp)) is not None:
        (out / RECORD).touch()  # as new as what it was just compared with
        return made
    if out.absolute() == source.absolute():
        raise MilepostError(f"{out} is the input; give another folder")
    check_target(out, force or (out / RECORD).is_file(), is_model=lambda: is_converted(out) or _has_config(out))
    with replacing(out) as draft:
        _copy_beside(config.parent, draft / HF if to == "torch_dist" else draft)
        if to == "torch_dist":
            (draft / WEIGHTS).mkdir()
        size = _size(source / WEIGHTS if to == "hf" else source)
        with tqdm(total=size, desc=out.name, unit="B", unit_scale=True, disable=not progress) as bar:
            job = Job(to, source, draft, name, registry.settings)
            count = _run(job, workers, bar.update)
        num_bytes = _size(draft / WEIGHTS if to == "torch_dist" else draft)
        record = {**stamp, "num_tensors": count, "num_bytes": num_bytes}
        (draft / RECORD).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return Converted(out, to, name, count, num_bytes, skipped=False)


def fingerprint(source: Path, to: Format = "torch_dist") -> str:
    """Return the SHA-256 over the files that a conversion reads, names included.

    A converted folder has that of its own input: it came from there and is never changed.
    """
    if to == "hf":
        return str(_record(source)["fingerprint"])
    files = [*weight_files(source), *_beside(source)]

    def digest(file: Path) -> str:
        with file.open("rb") as stream:
            return f"{file.name} {hashlib.file_digest(stream, 'sha256').hexdigest()}\n"

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return hashlib.sha256("".join(pool.map(digest, files)).encode()).hexdigest()


def architecture(config: Path) -> str:
    """Return the architecture that a `config.json` names. Raises CheckpointError if there is none."""
    try:
        found = json.loads(config.read_text(encoding="utf-8"))
        return str(found["architectures"][0])
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{config.parent} has no config.json; expected a Hugging Face folder, or what milepost convert made of one "
            "(a run's checkpoint is written as a Hugging Face folder by milepost export)"
        ) from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise CheckpointError(
            f'{config} names no architecture; expected "architectures": ["Qwen3ForCausalLM"]'
        ) from error


def _up_to_date(out: Path, stamp: Mapping[str, str]) -> Converted | None:
    if not (out / RECORD).is_file():
        return None
    found = _record(out)
    if any(found.get(key) != value for key, value in stamp.items()):
        return None
    return Converted(out, found["format"], found["recipe"], found["num_tensors"], found["num_bytes"], skipped=True)


def _record(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{folder / RECORD} is no JSON: {error}; remove {folder} and convert anew") from error
    if not isinstance(found, dict) or "fingerprint" not in found:
        raise CheckpointError(f"{folder / RECORD} is no record of a conversion; remove {folder} and convert anew")
    return found


def _has_config(folder: Path) -> bool:
    return (folder / "config.json").is_file()


def _beside(folder: Path) -> Iterable[Path]:
    """Yield what a model folder has beside weights: config, tokenizer, licence."""
    for file in sorted(folder.iterdir()):
        weights = file.suffix in WEIGHT_SUFFIXES or file.name.endswith(INDEX_SUFFIX)
        if file.is_file() and not weights and not file.name.startswith(".") and file.name != RECORD:
            yield file


def _copy_beside(folder: Path, out: Path) -> None:
    out.mkdir(exist_ok=True)
    for file in _beside(folder):
        shutil.copyfile(file, out / file.name)


def _size(folder: Path) -> int:
    """Bytes of the weights in a folder, of whichever format."""
    suffixes = (".safetensors", ".distcp")
    return sum(file.stat().st_size for file in folder.iterdir() if file.suffix in suffixes)


def _work(job: Job, progress: Callable[[int], object]) -> int:
    """Convert on this rank; return the number of tensors."""
    with warnings.catch_warnings():
        # Megatron and torch warn of what a CPU lacks and of their own deprecations; none of it is about weights.
        warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")
        from milepost.recipe import Recipe
        from milepost.training.megatron import convert as ranks

        recipe: Recipe = Registry.load(**job.plugins).resolve("model", job.recipe)
        half = recipe.megatron
        if half is None:
            raise MilepostError(
                f"recipe {job.recipe!r} has no Megatron half, so there is nothing to convert to or from"
            )
        try:
            if job.to == "hf":
                return ranks.write_hf(job.source / WEIGHTS, job.source / HF, job.draft, half, progress)[0]
            return ranks.write_megatron(job.source, job.draft / WEIGHTS, half, progress)
        except ValueError as error:
            raise CheckpointError(f"{job.source}: {error}") from error


def _run(job: Job, workers: int, progress: Callable[[int], object]) -> int:
    """Convert in `workers` processes; one is this process."""
    if workers == 1:
        return _work(job, progress)
    context = multiprocessing.get_context("spawn")
    reports: Any = context.Queue()
    count = 0
    with tempfile.TemporaryDirectory(prefix="milepost-convert-") as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_rank_main, args=(job, rank, workers, store, reports)) for rank in range(workers)
        ]
        for process in ranks:
            process.start()
        try:
            waiting = set(range(workers))
            while waiting:
                try:
                    kind, rank, value = reports.get(timeout=ALIVE_INTERVAL)
                except queue.Empty:
                    dead = [rank for rank in waiting if not ranks[rank].is_alive()]
                    if dead and reports.empty():
                        code = ranks[dead[0]].exitcode
                        raise CheckpointError(
                            f"worker {dead[0]} of {workers} died with exit code {code} before it was done; with "
                            "too little memory, which is likely, take fewer --workers"
                        ) from None
                    continue
                if kind == "progress":
                    progress(value)
                elif kind == "done":
                    waiting.discard(rank)
                    count = value
                elif kind == "refused":
                    raise CheckpointError(value)
                else:
                    raise RuntimeError(f"worker {rank} of {workers} failed:\n{value}")
            for process in ranks:
                process.join()
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                    process.join()
    return count


def _rank_main(job: Job, rank: int, world: int, store: str, reports: Any) -> None:
    """What a worker process does: its share, and reports of it."""
    try:
        import torch
        import torch.distributed as dist

        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(1)
        shared = dist.FileStore(store, world)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=world)
        count = _work(job, lambda num_bytes: reports.put(("progress", rank, num_bytes)))
        reports.put(("done", rank, count))
        dist.destroy_process_group()
    except MilepostError as error:
        reports.put(("refused", rank, str(error)))
    except BaseException:  # noqa: BLE001 - told to the parent, which raises it
        reports.put(("failed", rank, traceback.format_exc()))


def as_json(done: Converted) -> str:
    """Return the outcome as one JSON object."""
    return json.dumps({**asdict(done), "folder": str(done.folder)})
