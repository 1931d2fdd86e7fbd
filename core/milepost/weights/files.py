"""A Hugging Face checkpoint folder read tensor by tensor, or slice by slice, without loading it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from milepost.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class HFCheckpoint:
    """The tensors of a checkpoint folder in safetensors format, one file or several with an index.

    Raises CheckpointError if the folder has neither, or its index is not readable.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        index = folder / INDEX
        if index.is_file():
            try:
                places: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError) as error:
                raise CheckpointError(f"{index} is no index of safetensors files: {error}") from error
            files = sorted(set(places.values()))
        elif (folder / SINGLE).is_file():
            files = [SINGLE]
        else:
            raise CheckpointError(f"{folder} has neither {SINGLE} nor {INDEX}; give a checkpoint in safetensors format")
        if missing := [name for name in files if not (folder / name).is_file()]:
            raise CheckpointError(f"{folder / missing[0]} is missing, though {INDEX} names it; copy it there")
        # The files are mapped, not read, so handles cost nothing until a slice is asked for.
        try:
            self._files = [safe_open(folder / name, framework="pt") for name in files]
        except SafetensorError as error:
            raise CheckpointError(
                f"the weights in {folder} cannot be read: {error}; copy the checkpoint anew"
            ) from error
        self._owners: dict[str, Any] = {name: file for file in self._files for name in _names(file)}

    @property
    def names(self) -> Sequence[str]:
        """Names of all tensors."""
        return list(self._owners)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor. Raises CheckpointError if there is none of that name."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, slices: Sequence[tuple[int, int]] | None = None) -> Tensor:
        """Read a tensor, or start to stop of it along each dimension. Raises CheckpointError as `shape` does."""
        stored = self._slice(name)
        if slices is None:
            slices = [(0, extent) for extent in stored.get_shape()]
        tensor: Tensor = stored[tuple(slice(start, stop) for start, stop in slices)]
        return tensor

    def _slice(self, name: str) -> Any:
        if name not in self._owners:
            raise CheckpointError(f"{self.folder} has no tensor {name!r}; is it a checkpoint of this architecture?")
        return self._owners[name].get_slice(name)


def _names(file: Any) -> list[str]:
    names: list[str] = file.keys()
    return names
