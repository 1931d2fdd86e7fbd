"""Loading any Hugging Face causal model and taking it apart: the `load` that the recipes' `hf` halves share."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from milepost.errors import CheckpointError
from milepost.recipe import HFModel

PACKED_ATTENTION = "milepost_packed"


def load_causal_lm(
    path: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    attention: str = PACKED_ATTENTION,
    remote_code: bool = False,
) -> HFModel:
    """Load the checkpoint folder `path` as an `AutoModelForCausalLM`; nothing is downloaded.

    Python code that comes with a checkpoint is not run. Raises CheckpointError if weights are missing, unreadable or
    not of the shapes that `config.json` asks for; ValueError if the model has no separate body and output head.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    # A bar for every model of every rank would be most of what a run prints.
    logging.disable_progress_bar()
    if attention == PACKED_ATTENTION:
        # transformers knows the implementation once this has been imported.
        importlib.import_module("milepost.training.attention")
    if not path.is_dir():
        raise CheckpointError(f"there is no folder {path}; expected a checkpoint in Hugging Face format")
    # transformers reports what it finds missing, and draws new values for it; here it is an error instead.
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            attn_implementation=attention,
            local_files_only=True,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"the weights in {path} cannot be read: {error}; copy the checkpoint anew") from error
    finally:
        logging.set_verbosity(verbosity)
    _check_complete(path, found)
    return take_apart(model.to(device))


def _check_complete(path: Path, found: dict[str, Any]) -> None:
    """Raise CheckpointError unless every weight of the model was in the checkpoint, in the model's shape."""
    if missing := sorted(found["missing_keys"]):
        raise CheckpointError(
            f"{path} lacks {len(missing)} of the model's tensors, the first is {missing[0]!r}; copy the checkpoint "
            "anew, or correct its config.json"
        )
    if wrong := sorted(found["mismatched_keys"]):
        name, stored, expected = wrong[0]
        raise CheckpointError(
            f"{path}: {len(wrong)} tensors have other shapes than its config.json asks for, the first is {name!r}: "
            f"{list(stored)} stored, {list(expected)} expected; one of the two belongs to another model"
        )


def take_apart(model: Any) -> HFModel:
    """Return the body, the head, and what the model does to logits, of a transformers causal model.

    Raises ValueError if the model has no separate body and output head.
    """
    body, head = model.base_model, model.get_output_embeddings()
    if body is model or head is None:
        raise ValueError(
            f"{type(model).__name__} has no separate body and output head, so its logits cannot be made in chunks; "
            "it needs a model recipe of its own"
        )
    config = model.config
    scale = float(getattr(config, "logit_scale", None) or 1.0)
    scale /= float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    return HFModel(model, body, head, scale, None if softcap is None else float(softcap))
