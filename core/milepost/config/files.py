"""The files and folders a run config names: where relative paths begin, and whether anything is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from milepost.config.schema import RunConfig
from milepost.errors import Problem

MODEL_FOLDERS = ("model.path", "reference.path", "teacher.path", "critic.init_from")
"""Hugging Face checkpoint folders."""


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


def input_paths(sections: Mapping[str, Any] | RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) of every input file or folder that a run config names."""
    get = sections.get if isinstance(sections, Mapping) else lambda name: getattr(sections, name)
    for path in (*MODEL_FOLDERS, "checkpoint.init_from", "data.path"):
        section, _, key = path.partition(".")
        text = getattr(get(section), key, None)
        if text is not None:
            yield path, text
    for index, dataset in enumerate(getattr(get("eval"), "datasets", ())):
        yield f"eval.datasets.{index}.path", dataset.path


def missing_files(
    sections: Mapping[str, Any] | RunConfig, base_dir: Path, origin: Callable[[str], str]
) -> list[Problem]:
    """Return a problem for every input file or folder that does not exist."""
    problems = []
    for path, text in input_paths(sections):
        place = resolve_path(text, base_dir)
        if message := _missing(path, text, place, base_dir):
            problems.append(Problem(path, message, origin(path)))
    return problems


def _missing(path: str, text: str, place: Path, base_dir: Path) -> str | None:
    if path in MODEL_FOLDERS:
        expected = "a folder with a Hugging Face checkpoint (config.json, tokenizer, *.safetensors)"
        found = place.is_dir()
        if found and not (place / "config.json").is_file():
            return f"there is no config.json in {place}; expected {expected}"
        remedy = "; fetch one with: hf download NAME --local-dir FOLDER"
    elif path == "checkpoint.init_from":
        expected, found, remedy = "a checkpoint folder", place.is_dir(), ""
    else:
        expected, found, remedy = "a JSONL file", place.is_file(), ""
    if found:
        return None
    state = "is not that" if place.exists() else "does not exist"
    message = f"{text!r} was given, expected {expected}; {place} {state}"
    here = resolve_path(text, Path.cwd())
    if here != place and here.exists():
        # Paths on the command line are easily meant from the working directory.
        return f"{message} (relative paths begin at {base_dir}; {here} exists: give that absolute path)"
    return message + remedy
