"""Megatron-core on a machine without CUDA: for tests and laptops, on gloo.

`install` does nothing where CUDA is there. Without it, the modules under `megatron.core`, and they alone, see a `torch`
whose CUDA calls answer for the CPU; `torch` itself stays as it is, but for `Tensor.cuda`, which does nothing. What it
changes are Megatron's internals, so it knows one version and refuses others.

`keep_adam_steps` is needed with CUDA too: torch's Adam keeps its step count as a tensor per parameter, which Megatron's
distributed optimizer, made for fused optimizers without one, loses and then shares between all parameters.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from milepost.errors import MilepostError

VERSION = "0.16.1"
"""The megatron-core that this module knows."""

LATE_MODULES = (
    "distributed",
    "models.gpt",
    "optimizer",
    "pipeline_parallel",
    "tensor_parallel.random",
    "dist_checkpointing.strategies.torch",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.fully_parallel",
)
"""Modules that Megatron imports on first use; they are imported first, so that they see the replaced torch too."""

CPU = torch.device("cpu")
_installed = False


def install() -> None:
    """Make Megatron-core run on this machine's CPUs; nothing happens where there is CUDA, or a second time.

    Raises MilepostError for another version of megatron-core than the one this was made for.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    check_version()
    for name in LATE_MODULES:
        importlib.import_module(f"megatron.core.{name}")
    replaced = _cpu_torch()
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module is not None and vars(module).get("torch") is torch:
            vars(module)["torch"] = replaced
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    _replace_random_state()
    _accept_cpu_parameters()
    _count_on_host()
    _installed = True


def check_version() -> None:
    """Raise MilepostError unless the installed megatron-core is the version this module knows."""
    import megatron.core

    found = megatron.core.__version__
    if found != VERSION:
        raise MilepostError(
            f"megatron-core {found} is installed, but running it on a CPU was made for {VERSION} alone; "
            f"pip install megatron-core=={VERSION}, or train on a machine with CUDA"
        )


class _View(types.ModuleType):
    """A module that answers with what is replaced first, then with the real module."""

    def __init__(self, real: types.ModuleType, replaced: dict[str, Any]) -> None:
        super().__init__(real.__name__)
        self.__dict__.update(replaced)
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_real"], name)


class _InOrder:
    """A CUDA stream, and an event on one, of a machine that does one thing after the other."""

    def wait_stream(self, stream: _InOrder) -> None:
        """All that was asked is done."""

    def record_event(self) -> _InOrder:
        """Return an event that has happened."""
        return self

    def synchronize(self) -> None:
        """All that was asked is done."""


def _cpu_torch() -> types.ModuleType:
    stream = _InOrder()
    cuda = _View(
        torch.cuda,
        {
            "current_device": lambda: CPU,
            "synchronize": lambda *args: None,
            "empty_cache": lambda: None,
            # The dispatcher of experts' tokens copies counts to the host beside its own work.
            "Stream": lambda *args, **kwargs: stream,
            "current_stream": lambda *args: stream,
            "stream": lambda stream: contextlib.nullcontext(),
            "manual_seed": lambda seed: None,  # seeding torch is the caller's
            "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        },
    )
    makers = {name: _on_cpu(getattr(torch, name)) for name in ("tensor", "zeros", "ones", "empty", "empty_like")}
    return _View(torch, {"cuda": cuda, **makers})


def _on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    """Return a maker of tensors that takes a CUDA device for the CPU and pins nothing."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        return make(*args, **kwargs)

    return wrapped


def _replace_random_state() -> None:
    """There is no CUDA generator to fork; models without dropout draw nothing anyway."""
    import megatron.core.tensor_parallel.random as random

    class NoFork(random.CudaRNGStatesTracker):  # type: ignore[misc]
        def add(self, name: str, seed: int) -> None:
            self._is_initialized = True

        def fork(self, name: str | None = None) -> contextlib.AbstractContextManager[None]:
            return contextlib.nullcontext()

    random.CudaRNGStatesTracker = NoFork
    random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    random._set_cuda_rng_state = lambda *args, **kwargs: None


def _accept_cpu_parameters() -> None:
    """Megatron's optimizers sort parameters and gradients by `tensor.type()`, and know only CUDA's names."""
    import megatron.core.optimizer as optimizers
    import megatron.core.optimizer.optimizer as optimizer

    def renaming(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with _cuda_type_names():
                return function(*args, **kwargs)

        return wrapped

    optimizers.get_megatron_optimizer = renaming(optimizers.get_megatron_optimizer)
    optimizer.clip_grad_by_total_norm_fp32 = renaming(optimizer.clip_grad_by_total_norm_fp32)


def _count_on_host() -> None:
    """Tokens for each expert are counted in tensors, and sent by counts that came to the host as numpy arrays."""
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    def on_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = on_host


@contextlib.contextmanager
def _cuda_type_names() -> Iterator[None]:
    real = torch.Tensor.type

    def named(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    torch.Tensor.type = named  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.Tensor.type = real  # type: ignore[method-assign]


_steps_kept = False


def keep_adam_steps() -> None:
    """Make the distributed optimizer carry the step counts of torch's Adam through a checkpoint."""
    global _steps_kept
    if _steps_kept:
        return
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    real_set = DistributedOptimizer._set_main_param_and_optimizer_states
    real_load = DistributedOptimizer.load_state_dict

    def set_states(self: Any, parameter: Any, tensors: dict[str, Any]) -> Any:
        present = self._get_main_param_and_optimizer_states(parameter)
        steps = {name: value for name, value in present.items() if name == "step"}
        return real_set(self, parameter, {**steps, **tensors})

    def load_state_dict(self: Any, state: Any) -> None:
        real_load(self, state)
        # One tensor shared by all parameters would be counted up once for each of them.
        for entry in self.optimizer.state.values():
            if isinstance(entry.get("step"), torch.Tensor):
                entry["step"] = entry["step"].to(entry["exp_avg"].device, torch.float32, copy=True)

    DistributedOptimizer._set_main_param_and_optimizer_states = set_states
    DistributedOptimizer.load_state_dict = load_state_dict
    _steps_kept = True
