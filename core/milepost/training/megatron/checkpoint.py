"""A role's state in Megatron's distributed format (torch_dist), which any other layout can load."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException

from milepost.errors import CheckpointError, MilepostError
from milepost.training.megatron.roles import TrainedRole


def _metadata() -> dict[str, Any]:
    return {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
        "chained_optim_avoid_prefix": True,
    }


def _weights(role: TrainedRole) -> dict[str, Any]:
    if len(role.pieces) == 1:
        return {"model": role.pieces[0].sharded_state_dict(metadata=_metadata())}
    return {f"model{i}": piece.sharded_state_dict(metadata=_metadata()) for i, piece in enumerate(role.pieces)}


def _optimizer(role: TrainedRole, weights: dict[str, Any], *, loading: bool) -> Any:
    model = weights["model"] if len(role.pieces) == 1 else weights
    return role.optimizer.sharded_state_dict(model, is_loading=loading, metadata=_metadata())


def save(folder: Path, role: TrainedRole) -> None:
    """Write weights, optimizer and step count into a folder, which is made; called on all ranks."""
    if find_spec("psutil") is None:
        # Megatron's writer processes would die without it, and the ranks wait for them for ever.
        raise MilepostError("saving needs psutil, which is not installed here; pip install 'milepost[megatron]'")
    if dist.get_rank() == 0:
        folder.mkdir(exist_ok=True)
    dist.barrier()
    role.wait_for_optimizer()
    weights = _weights(role)
    state: dict[str, Any] = {**weights, "num_steps": role.num_steps, "optimizer_name": role.settings.name}
    state["num_optimizers"] = len(role.optimizer.chained_optimizers)
    if role.num_steps and role.settings.name == "adam":
        state["optimizer"] = _optimizer(role, weights, loading=False)
    dist_checkpointing.save(state, str(folder))
    dist.barrier()


def load(folder: Path, role: TrainedRole) -> None:
    """Restore what `save` wrote; called on all ranks. Raises CheckpointError if it does not fit this run."""
    common = _common(folder)
    name, num_steps = common["optimizer_name"], common["num_steps"]
    if name != role.settings.name:
        raise CheckpointError(
            f"{folder} is of optimizer {name!r}, this run's is {role.settings.name!r}; set optimizer.name to what it "
            "was, or start a new run with checkpoint.init_from"
        )
    # Megatron has an optimizer of its own for experts that ranks share, and finds the state of one in neither shape.
    count = len(role.optimizer.chained_optimizers)
    if common.get("num_optimizers", count) != count:
        saved = "whole on" if count > 1 else "shared by"
        raise CheckpointError(
            f"{folder} was saved with experts {saved} its ranks, in this run they are not, and the optimizer's state "
            "does not go over; set trainer.expert_parallel to what it was, or start a new run with checkpoint.init_from"
        )
    role.wait_for_optimizer()
    weights = _weights(role)
    state = dict(weights)
    if num_steps and name == "adam":
        for optimizer in role.optimizer.chained_optimizers:
            # Adam makes its state with its first step; loading needs somewhere to put it.
            optimizer._init_optimizer_states_with_dummy_values()
        state["optimizer"] = _optimizer(role, weights, loading=True)
    loaded = _load(folder, state)
    _set_weights(role, loaded)
    if "optimizer" in loaded:
        role.optimizer.load_state_dict(loaded["optimizer"])
    else:
        role.optimizer.reload_model_params()
    role.num_steps = num_steps


def load_weights(folder: Path, role: TrainedRole) -> None:
    """Take the weights alone; called on all ranks. Raises CheckpointError if they are of another model."""
    _common(folder)
    role.wait_for_optimizer()
    _set_weights(role, _load(folder, _weights(role)))
    role.optimizer.reload_model_params()


def _common(folder: Path) -> dict[str, Any]:
    if not (folder / "metadata.json").is_file():
        raise CheckpointError(
            f"{folder} is no checkpoint of the Megatron trainer; was it saved by trainer.backend torch?"
        )
    common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(folder))
    return common


def _load(folder: Path, state: dict[str, Any]) -> dict[str, Any]:
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
    except (CheckpointingException, RuntimeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} does not fit this run: {error}; resume with the model, dtype and optimizer it was saved with"
        ) from error
    return loaded


@torch.no_grad()
def _set_weights(role: TrainedRole, loaded: dict[str, Any]) -> None:
    for index, piece in enumerate(role.pieces):
        piece.load_state_dict(loaded["model" if len(role.pieces) == 1 else f"model{index}"])
