"""Fetching what a run config calls by its name on the Hub: models and datasets, into the Hub's own cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from milepost.config.files import MODEL_FOLDERS, data_sources, model_paths, resolve_path
from milepost.config.schema import RunConfig
from milepost.config.sources import hub_name, need
from milepost.errors import ConfigError, Problem

MODEL_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*"]
"""Files of a model that are fetched: weights in one format, config, tokenizer, code."""
DATASET_FILES = ["*.parquet", "*.jsonl", "*.json", "*.csv", "*.arrow", "README.md"]
"""Files of a dataset that are fetched; its README says which file belongs to which split."""


@dataclass(frozen=True, slots=True)
class Named:
    """Something that a run config calls by a name on the Hub."""

    path: str
    """Dotted path in the run config."""
    name: str
    kind: Literal["model", "dataset"]


def named_on_hub(config: RunConfig, base_dir: Path) -> Iterator[Named]:
    """Yield what is a name on the Hub and not a file or folder beside the run config; each name once per kind."""
    models = [(path, text) for path, text in model_paths(config) if path in MODEL_FOLDERS]
    sources = [(path, source.place) for path, source in data_sources(config)]
    seen: set[tuple[str, str]] = set()
    places: tuple[tuple[Literal["model", "dataset"], list[tuple[str, str]]], ...]
    places = (("model", models), ("dataset", sources))
    for kind, named in places:
        for path, text in named:
            if hub_name(text) and not resolve_path(text, base_dir).exists() and (kind, text) not in seen:
                seen.add((kind, text))
                yield Named(path, text, kind)


def fetch(named: Named) -> Path:
    """Fetch a model or dataset, skipping files that are there; return its folder in the cache.

    Without a network, what was fetched before is taken as it is. Raises ConfigError if it cannot be had.
    """
    hub: Any = need("huggingface_hub", f"fetching {named.name}")
    try:
        folder = hub.snapshot_download(
            named.name,
            repo_type=named.kind,
            allow_patterns=MODEL_FILES if named.kind == "model" else DATASET_FILES,
        )
    except (OSError, ValueError, hub.errors.HFValidationError) as error:
        # huggingface_hub's errors for the network, for a name that does not exist and for a locked one are OSErrors.
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            [
                Problem(
                    named.path,
                    f"{named.name!r} is neither a path here nor could it be fetched from the Hub: {first}. Check the "
                    "spelling and the network (HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE), or give the path of a copy",
                )
            ]
        ) from error
    return Path(folder)
