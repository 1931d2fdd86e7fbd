"""The rows of a dataset: JSON Lines, parquet, and folders that the library `datasets` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from milepost.config.sources import SUFFIXES, Source, is_dataset_folder, open_folder, open_parquet
from milepost.errors import DataError

PROGRESS_BYTES = 32 * 2**20
"""Files from this size on are read under a progress bar."""


class Row(NamedTuple):
    """One row, and where it stands, for messages."""

    where: str
    values: Any


def read_rows(source: Source) -> Iterator[Row]:
    """Yield the rows of a source, in order; a message names a row by its number from 1, in a JSON Lines file its line.

    Raises:
        DataError: if there is no such file or folder, it cannot be read, or a row is broken.
        ConfigError: if the package that reads it is not installed.
    """
    path = Path(source.place)
    if path.is_dir():
        if not is_dataset_folder(path):
            raise DataError(
                f"{path} is a folder without a dataset; expected one, or {' or '.join(SUFFIXES)} files in it"
            )
        rows = read_folder(path, source)
    elif not path.is_file():
        raise DataError(f"{path} does not exist; expected a file or dataset folder with one row per prompt")
    elif path.suffix.lower() == ".parquet":
        rows = read_parquet(path)
    elif path.suffix.lower() == ".jsonl":
        rows = read_jsonl(path)
    else:
        suffix = path.suffix or "files without a suffix"
        raise DataError(f"{path}: cannot read {suffix}; expected {', '.join(SUFFIXES)}, or a dataset folder")
    start, stop = source.start, source.stop
    if (start or 0) >= 0 and (stop is None or stop >= 0):
        return islice(rows, start, stop)
    # Counting from the end needs the end.
    return iter(list(rows)[start:stop])


def read_jsonl(path: Path) -> Iterator[Row]:
    """Yield the rows of a JSON Lines file; blank lines are skipped.

    Raises:
        DataError: with file and line, for a line that is not UTF-8 or not a JSON object.
    """
    size = path.stat().st_size
    with (
        path.open("rb") as file,
        tqdm(total=size, desc=path.name, unit="B", unit_scale=True, disable=size < PROGRESS_BYTES) as bar,
    ):
        for number, line in enumerate(file, 1):
            bar.update(len(line))
            where = f"{path}:{number}"
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                values = json.loads(text) if text else None
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: expected one JSON object per line: {error}") from error
            if not text:
                continue
            if not isinstance(values, dict):
                raise DataError(f"{where}: expected a JSON object, found {excerpt(values)}")
            yield Row(where, values)


def read_parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a parquet file. Raises DataError if it is none."""
    file = open_parquet(path)
    number = 0
    with tqdm(
        total=file.metadata.num_rows, desc=path.name, unit="row", disable=path.stat().st_size < PROGRESS_BYTES
    ) as bar:
        for batch in file.iter_batches():
            for values in batch.to_pylist():
                number += 1
                yield Row(f"{path}:{number}", values)
            bar.update(batch.num_rows)


def read_folder(folder: Path, source: Source) -> Iterator[Row]:
    """Yield the rows of a dataset folder's split. Raises DataError if it cannot be read or has no such split."""
    for number, values in enumerate(open_folder(folder, source), 1):
        yield Row(f"{folder}:{number}", values)


def excerpt(value: Any) -> str:
    """Return a value as a short text for a message."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
