"""What `milepost convert` leaves: how it is known, and whether it can stand for the folder it was made of."""

from __future__ import annotations

from pathlib import Path

RECORD = "milepost-conversion.json"
"""What a conversion was made of."""
WEIGHTS = "weights"
"""Its weights, in torch_dist."""
INDEX_SUFFIX = ".index.json"


def is_converted(folder: Path) -> bool:
    """Whether a folder is what `convert` makes of a Hugging Face folder."""
    return (folder / RECORD).is_file() and (folder / WEIGHTS).is_dir()


def weight_files(folder: Path) -> list[Path]:
    """Return the files of a Hugging Face folder that hold weights, or say which does."""
    return sorted([*folder.glob("*.safetensors"), *folder.glob(f"*.safetensors{INDEX_SUFFIX}")])


def conversion_problem(source: Path, folder: Path) -> str | None:
    """Return why a converted folder cannot stand for the Hugging Face folder `source`, if it cannot.

    That it is newer than the weights there is all that is asked: a fingerprint reads the whole of them.
    """
    if not is_converted(folder):
        return f"{folder} is not there, or not what a conversion makes"
    made = (folder / RECORD).stat().st_mtime
    newer = [file.name for file in weight_files(source) if file.stat().st_mtime > made]
    return f"{folder} is older than {newer[0]} in {source}" if newer else None
