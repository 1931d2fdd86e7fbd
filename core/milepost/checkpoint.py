"""Checkpoints: a folder per save that is complete or absent, whenever the process dies.

A save is written under a hidden name beside its final place, flushed to the disk, given a manifest of its files and
only then renamed. Old saves are renamed out of sight before they are deleted. So whatever bears a checkpoint's name is
whole, and what an interrupted process left behind bears a hidden name and is cleared by the next save.

Importing this imports neither torch nor numpy: planning asks it whether there is something to resume.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milepost.errors import CheckpointError

if TYPE_CHECKING:
    from torch import Tensor

MANIFEST = "manifest.json"
STATE = "state.json"

_NAME = re.compile(r"rollout-(\d{6,})")
_SAVING = ".saving"
_REPLACED = ".replaced"
_REMOVING = ".removing"
_HASH_THREADS = 8


class CheckpointStore:
    """The checkpoints of one run, `RUN_DIR/checkpoints/rollout-000020/` and so on."""

    def __init__(self, run_dir: str | Path, keep: int) -> None:
        """Look after `run_dir`'s checkpoints, keeping the newest `keep` (at least 1); nothing is touched yet."""
        if keep < 1:
            raise ValueError(f"keep is {keep}, expected at least 1")
        self.folder = Path(run_dir) / "checkpoints"
        self.keep = keep

    def all(self) -> list[Path]:
        """Return the complete checkpoints, oldest rollout first."""
        return [folder for _, folder in sorted(self._complete().items())]

    def latest(self) -> Path | None:
        """Return the complete checkpoint of the highest rollout, or None; `verify` it before use."""
        complete = self.all()
        return complete[-1] if complete else None

    @contextmanager
    def saving(self, rollout: int) -> Iterator[Path]:
        """Give an empty folder to fill, which becomes the checkpoint of `rollout` when the block ends well.

        A checkpoint of the same rollout is replaced; then the oldest beyond `keep` are removed, never the new one. If
        the block raises, nothing has changed. All files must be closed when it ends.
        """
        if rollout < 0:
            raise ValueError(f"rollout is {rollout}, expected 0 or more")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._clear_leftovers()
        final = self.folder / f"rollout-{rollout:06d}"
        draft = _hidden(final, _SAVING)
        draft.mkdir()
        try:
            yield draft
            _write_manifest(draft)
            _sync_tree(draft)
        except BaseException:
            shutil.rmtree(draft)
            raise
        if final.exists():
            final.rename(_hidden(final, _REPLACED))
        draft.rename(final)
        _sync(self.folder)
        _sync(self.folder.parent)
        self._remove(_hidden(final, _REPLACED))
        others = sorted(number for number in self._complete() if number != rollout)
        for number in others[: max(0, len(others) - (self.keep - 1))]:
            self._remove(self.folder / f"rollout-{number:06d}")

    def _complete(self) -> dict[int, Path]:
        """Return the folders by rollout. One set aside counts while its replacement is not in place yet."""
        found: dict[int, Path] = {}
        if not self.folder.is_dir():
            return found
        for folder in sorted(self.folder.iterdir()):  # hidden names come first, so that a final one wins
            name = folder.name.removeprefix(".").removesuffix(_REPLACED)
            match = _NAME.fullmatch(name)
            if match and (folder / MANIFEST).is_file():
                found[int(match[1])] = folder
        return found

    def _clear_leftovers(self) -> None:
        """Undo what interrupted saves left: put back what was set aside without being replaced, delete the rest."""
        for folder in self.folder.glob(f".rollout-*{_REPLACED}"):
            final = self.folder / folder.name.removeprefix(".").removesuffix(_REPLACED)
            if not final.exists():
                folder.rename(final)
        for suffix in (_SAVING, _REPLACED, _REMOVING):
            for folder in self.folder.glob(f".rollout-*{suffix}"):
                shutil.rmtree(folder)

    def _remove(self, folder: Path) -> None:
        """Delete a checkpoint; it loses its name first, so that half of one never passes for a whole."""
        if not folder.exists():
            return
        hidden = folder if folder.name.startswith(".") else folder.rename(_hidden(folder, _REMOVING))
        shutil.rmtree(hidden)


def verify(folder: Path) -> None:
    """Check every file of a checkpoint against its manifest, size first, then SHA-256.

    Raises:
        CheckpointError: naming the file that is missing, truncated or altered.
    """
    advice = f"remove or rename {folder} to go on from the checkpoint before it, or start a new run"
    listed = _read_json(folder / MANIFEST).get("files")
    if not isinstance(listed, dict):
        raise CheckpointError(f"{folder / MANIFEST} lists no files; {advice}")
    files = {folder / name: entry for name, entry in listed.items()}
    for file, entry in files.items():
        if not file.is_file():
            raise CheckpointError(f"{file} is missing; {advice}")
        if (size := file.stat().st_size) != entry["size"]:
            raise CheckpointError(f"{file} has {size} bytes, expected {entry['size']}; {advice}")
    for file, found in _hash_files(list(files)).items():
        if found != files[file]["sha256"]:
            raise CheckpointError(f"{file} has SHA-256 {found}, expected {files[file]['sha256']}; {advice}")


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write plain state (numbers, texts, lists, mappings with text keys; numpy's too) as `state.json`.

    Floats come back exactly, NaN and infinities included; tuples and arrays come back as lists.

    Raises:
        TypeError: naming what in the state is none of these; tensors belong into `save_tensors`.
    """
    (folder / STATE).write_text(json.dumps(_plain(state, "state"), indent=1) + "\n", encoding="utf-8")


def read_state(folder: Path) -> dict[str, Any]:
    """Return what `write_state` wrote. Raises CheckpointError if it is missing or unreadable."""
    return _read_json(folder / STATE)


def save_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors of any shape, dtype and device to a safetensors file.

    Tensors that share memory (tied weights, views) are written once for each name.

    Raises:
        OSError: if the file cannot be written, because the disk is full for example.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    contents: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        value = tensor.detach().cpu().contiguous()
        storage = value.untyped_storage()
        # safetensors refuses two names for one memory, and would write more than a view of it.
        if storage.data_ptr() in storages or storage.nbytes() != value.nbytes:
            value = value.clone()
        storages.add(value.untyped_storage().data_ptr())
        contents[name] = value
    try:
        save_file(contents, path, dict(metadata) if metadata else None)
    except SafetensorError as error:
        # Its writer knows the reason only as text: "I/O error: No space left on device (os error 28)".
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(path)) from error


def load_tensors(path: Path, device: str = "cpu") -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, with their dtypes. Raises CheckpointError if it cannot be read."""
    from safetensors.torch import load_file

    return _read_safetensors(path, lambda: load_file(path, device=device))


def load_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a safetensors file. Raises CheckpointError if it cannot be read."""
    from safetensors import safe_open

    def read() -> dict[str, str]:
        with safe_open(path, framework="numpy") as file:
            return dict(file.metadata() or {})

    return _read_safetensors(path, read)


def _read_safetensors(path: Path, read: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    from safetensors import SafetensorError

    try:
        return read()
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; use another checkpoint of the run") from error
    except SafetensorError as error:
        raise CheckpointError(f"{path} is no intact safetensors file: {error}") from error


def _hidden(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _write_manifest(folder: Path) -> None:
    files = _files(folder)
    hashes = _hash_files(files)
    entries = {str(f.relative_to(folder)): {"size": f.stat().st_size, "sha256": hashes[f]} for f in files}
    (folder / MANIFEST).write_text(json.dumps({"files": entries}, indent=1) + "\n", encoding="utf-8")


def _hash_files(files: list[Path]) -> dict[Path, str]:
    """Return the SHA-256 of each file; several at once, because hashing is slower than a fast disk."""

    def sha256(file: Path) -> str:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    with ThreadPoolExecutor(min(_HASH_THREADS, os.cpu_count() or 1)) as pool:
        return dict(zip(files, pool.map(sha256, files), strict=True))


def _sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    """Flush a file or folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing; {file.parent} is no complete checkpoint") from error
    except ValueError as error:
        raise CheckpointError(f"{file} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds {type(value).__name__}, expected a mapping")
    return value


def _plain(value: Any, where: str) -> Any:
    """Return a value in JSON's own types, or raise TypeError saying where it is not one of them."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{where} has the key {wrong[0]!r}, expected texts; JSON would turn it into one silently")
        return {key: _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):  # numpy itself need not be installed
        return _plain(value.tolist(), where)
    raise TypeError(f"{where} is a {type(value).__name__}, which JSON cannot hold; save tensors with save_tensors")
