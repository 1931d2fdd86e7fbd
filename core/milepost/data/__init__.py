"""Prompts: rows of files and datasets become tasks, which a source hands out batch by batch and can resume."""

from milepost.data.prompts import PromptSource
from milepost.data.tasks import Counts, Dataset, load_dataset, lookup

__all__ = ["Counts", "Dataset", "PromptSource", "load_dataset", "lookup"]
