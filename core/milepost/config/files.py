"""The files and folders a run config names: where relative paths begin, and whether anything is there."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from milepost.config.schema import RunConfig
from milepost.config.sources import Source, hub_name, hub_snapshot, is_dataset_folder, read_sources
from milepost.errors import Problem

MODEL_FOLDERS = ("model.path", "reference.path", "teacher.path", "critic.init_from")
"""Hugging Face checkpoint folders."""
FOLDERS = (*MODEL_FOLDERS, "checkpoint.init_from", "model.converted")
"""Those, and folders that milepost wrote."""
MAX_SHOWN = 200
"""Characters of a path that a message shows."""


def resolve_path(text: str, base_dir: Path) -> Path:
    """Return the absolute path that a text in a run config means: relative ones begin at `base_dir`, `~` is home."""
    try:
        given = Path(text).expanduser()
    except RuntimeError:
        # A `~name` of nobody's home is then the name of a folder.
        given = Path(text)
    path = Path(base_dir, given).absolute()
    # Links keep their names, except where `..` has to be taken out.
    return path.resolve() if ".." in path.parts else path


def resolve_model(text: str, base_dir: Path) -> Path:
    """Return the folder of a checkpoint: a path, or where the Hub's cache has what `ORGANISATION/NAME` means there."""
    return _or_fetched(text, base_dir, "model")


def resolve_data(text: str, base_dir: Path) -> Path:
    """Return the file or folder of a data source without slice: a path, or where the Hub's cache has a name."""
    return _or_fetched(text, base_dir, "dataset")


def _or_fetched(text: str, base_dir: Path, kind: Literal["model", "dataset"]) -> Path:
    place = resolve_path(text, base_dir)
    # What lies beside the run config wins over a name on the Hub.
    return place if place.exists() else hub_snapshot(text, kind) or place


def data_sources(sections: Mapping[str, Any] | RunConfig) -> Iterator[tuple[str, Source]]:
    """Yield (dotted path, source) of every place that a run config takes prompts from."""
    get = sections.get if isinstance(sections, Mapping) else lambda name: getattr(sections, name)
    places = [("data.path", getattr(get("data"), "path", None))]
    for index, dataset in enumerate(getattr(get("eval"), "datasets", ())):
        places.append((f"eval.datasets.{index}.path", dataset.path))
    for path, value in places:
        if value is None:
            continue
        for index, source in enumerate(read_sources(value)):
            yield f"{path}.{index}" if isinstance(value, tuple) else path, source


def model_paths(sections: Mapping[str, Any] | RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) of every folder of weights that a run config names."""
    get = sections.get if isinstance(sections, Mapping) else lambda name: getattr(sections, name)
    for path in FOLDERS:
        section, _, key = path.partition(".")
        text = getattr(get(section), key, None)
        if text is not None:
            yield path, text


def missing_files(
    sections: Mapping[str, Any] | RunConfig, base_dir: Path, origin: Callable[[str], str]
) -> list[Problem]:
    """Return a problem for every input file or folder that does not exist."""
    looks: list[tuple[str, str, Callable[[], str | None]]] = []
    looks += ((path, text, partial(_missing_model, path, text, base_dir)) for path, text in model_paths(sections))
    looks += ((path, src.place, partial(_unusable_source, src, base_dir)) for path, src in data_sources(sections))
    problems = []
    for path, text, look in looks:
        try:
            message = look()
        except OSError as error:
            # A name no file can have, or a folder that may not be looked into.
            shown = repr(text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}...")
            message = f"{shown} was given, which cannot be looked up: {error.strerror or error}"
        if message:
            problems.append(Problem(path, message, origin(path)))
    return problems


def _missing_model(path: str, text: str, base_dir: Path) -> str | None:
    if path == "model.converted":
        return None  # `milepost prepare` makes it from what is planned here
    if path == "checkpoint.init_from":
        place = resolve_path(text, base_dir)
        return None if place.is_dir() else _missing(text, place, base_dir, "a checkpoint folder", name=False)
    place = resolve_model(text, base_dir)
    expected = "a folder with a Hugging Face checkpoint (config.json, tokenizer, *.safetensors)"
    if not place.is_dir():
        return _missing(text, place, base_dir, expected, name=hub_name(text))
    if not (place / "config.json").is_file():
        return f"there is no config.json in {place}; expected {expected}"
    return None


def _unusable_source(source: Source, base_dir: Path) -> str | None:
    place = resolve_data(source.place, base_dir)
    if place.is_file() and (source.split or source.subset):
        return f"{place} is a file, which has no splits or subsets; remove `split` and `subset`"
    if place.is_file() or is_dataset_folder(place):
        return None
    expected = "a JSONL or parquet file, or a dataset folder"
    if re.search(r"@\[[^\]]*\]$", source.place):
        return (
            f"{source.place!r} was given, but its end is no slice of rows; expected FILE@[a:b], a or b may be left out"
        )
    return _missing(source.place, place, base_dir, expected, name=hub_name(source.place))


def _missing(text: str, place: Path, base_dir: Path, expected: str, *, name: bool) -> str:
    state = "is not that" if place.exists() else "does not exist"
    message = f"{text!r} was given, expected {expected}; {place} {state}"
    here = resolve_path(text, Path.cwd())
    if here != place and here.exists():
        # Paths on the command line are easily meant from the working directory.
        return f"{message} (relative paths begin at {base_dir}; {here} exists: give that absolute path)"
    return f"{message}; if it is a name on the Hub, fetch it with: milepost prepare RUN.yaml" if name else message
