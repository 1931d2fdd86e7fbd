"""Where prompts come from: files, dataset folders and names on the Hub, slices and mixtures of them.

Importing this imports nothing heavy. Parquet files need pyarrow and dataset folders need `datasets`, which are imported
when such a source is read or its rows are counted.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from milepost.config.schema import DataSource
from milepost.errors import ConfigError, DataError, Problem

SUFFIXES = (".jsonl", ".parquet")
"""Endings of the files that can be read."""
FOLDER_FILES = (".parquet", ".jsonl", ".arrow", ".csv")
"""Endings of files that make a folder a dataset."""

_SLICE = re.compile(r"(?P<place>.+)@\[(?P<start>-?\d*):(?P<stop>-?\d*)\]", re.DOTALL)
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

DataPath = str | DataSource | tuple[str | DataSource, ...]
"""What `data.path` may be."""


@dataclass(frozen=True, slots=True)
class Source:
    """One place that rows are taken from."""

    place: str
    """File, folder or name, without the slice."""
    start: int | None = None
    stop: int | None = None
    """Rows start to stop are used, as Python slices count."""
    split: str | None = None
    subset: str | None = None
    weight: Fraction = Fraction(1)
    """How often an epoch goes over each row."""

    @property
    def rows(self) -> slice:
        """The rows that are used."""
        return slice(self.start, self.stop)

    @property
    def text(self) -> str:
        """The place with its slice, as a run config has it."""
        if self.start is None and self.stop is None:
            return self.place
        start, stop = ("" if edge is None else str(edge) for edge in (self.start, self.stop))
        return f"{self.place}@[{start}:{stop}]"


def read_sources(path: DataPath | Path | Sequence[str | DataSource]) -> list[Source]:
    """Return the sources that a `path` of the run config names, in order."""
    if isinstance(path, str | DataSource | Path):
        path = (str(path) if isinstance(path, Path) else path,)
    return [_source(item) for item in path]


def _source(item: str | DataSource) -> Source:
    given = DataSource(path=item) if isinstance(item, str) else item
    match = _SLICE.fullmatch(given.path)
    edges = (
        {key: int(match[key]) if match[key] not in ("", "-") else None for key in ("start", "stop")} if match else {}
    )
    return Source(
        match["place"] if match else given.path,
        split=given.split,
        subset=given.subset,
        # Decimal places as they were written: 0.1 is a tenth.
        weight=Fraction(repr(given.weight)),
        **edges,
    )


def relocated(path: DataPath, move: Any) -> DataPath:
    """Return a `path` of the run config with every place replaced by `str(move(place))`; slices and weights stay."""

    def one(item: str | DataSource) -> str | DataSource:
        source = _source(item)
        text = replace(source, place=str(move(source.place))).text
        return text if isinstance(item, str) else item.model_copy(update={"path": text})

    return tuple(one(item) for item in path) if isinstance(path, tuple) else one(path)


def hub_name(text: str) -> bool:
    """Whether a text has the form of a name on the Hub, `ORGANISATION/NAME`, and not of a file that can be read."""
    return _NAME.fullmatch(text) is not None and not text.endswith(SUFFIXES)


def hub_snapshot(name: str, kind: Literal["model", "dataset"]) -> Path | None:
    """Return the folder in the Hub's cache that holds the main revision of a name, None if it was not fetched.

    The cache is where HF_HUB_CACHE, HF_HOME or XDG_CACHE_HOME put it, as for huggingface_hub.
    """
    if not hub_name(name):
        return None
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = Path(os.environ.get("HF_HUB_CACHE") or Path(home, "hub")).expanduser()
    folder = cache / f"{kind}s--{name.replace('/', '--')}"
    reference = folder / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = folder / "snapshots" / reference.read_text(encoding="utf-8").strip()
    return snapshot if snapshot.is_dir() else None


def is_dataset_folder(folder: Path) -> bool:
    """Whether a folder is a saved dataset, or holds files that `datasets` reads."""
    if not folder.is_dir():
        return False
    if is_saved(folder):
        return True
    return any(file.suffix in FOLDER_FILES for file in folder.rglob("*") if file.is_file())


def is_saved(folder: Path) -> bool:
    """Whether a folder was made by `save_to_disk` of `datasets`."""
    return (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()


def need(module: str, what: str) -> Any:
    """Import a package that only some sources need. Raises ConfigError, naming the remedy, if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        if error.name != package:
            raise
        message = f"{what} needs the package {package}, which is not installed; run: pip install 'milepost[data]'"
        raise ConfigError([Problem("data.path", message)]) from None


def open_folder(folder: Path, source: Source) -> Any:
    """Return the `datasets.Dataset` of a folder: the subset and split that the source names, by default `train`.

    Raises DataError if the folder has no such split, or cannot be read.
    """
    datasets = need("datasets", f"the dataset folder {folder}")
    split = source.split or "train"
    try:
        if not is_saved(folder):
            return datasets.load_dataset(str(folder), source.subset, split=split)
        loaded = datasets.load_from_disk(str(folder))
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{folder}: datasets cannot read split {split!r}: {error}") from error
    if isinstance(loaded, datasets.Dataset):
        return loaded
    if split not in loaded:
        raise DataError(f"{folder} has no split {split!r}; it has {', '.join(map(repr, loaded))}: name one with split:")
    return loaded[split]


def count_rows(place: Path, source: Source) -> int:
    """Return how many rows a source that exists gives, its slice taken into account; nothing is tokenized.

    Raises DataError if it cannot be read, ConfigError if a package for it is missing.
    """
    if place.is_dir():
        total = len(open_folder(place, source))
    elif place.suffix.lower() == ".parquet":
        total = open_parquet(place).metadata.num_rows
    else:
        with place.open("rb") as file:
            total = sum(1 for line in file if line.strip())
    return len(range(total)[source.rows])


def open_parquet(path: Path) -> Any:
    """Return the `pyarrow.parquet.ParquetFile` of a path. Raises DataError if it is none."""
    parquet = need("pyarrow.parquet", f"the parquet file {path}")
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise DataError(f"{path} is no parquet file: {error}") from error


def epoch_bounds(num_rows: int, weight: Fraction, epoch: int) -> Iterator[tuple[int, int, int]]:
    """Yield (pass, start, stop) of what one epoch takes of a source with this many rows.

    A source is gone over pass after pass, each with every row once; epoch e takes floor(e w n) to floor((e + 1) w n)
    of that endless sequence. With weight 2 that is two whole passes, with 1/2 one half of the rows and the other half
    in the next epoch.
    """
    position, end = int(epoch * weight * num_rows), int((epoch + 1) * weight * num_rows)
    while position < end:
        number, start = divmod(position, num_rows)
        stop = min(num_rows, start + end - position)
        yield number, start, stop
        position += stop - start
