"""The arguments of a SGLang server: milepost's own, defaults for the device, and `engine.options` of the run config.

Which options there are is read from the source of the installed SGLang: importing its `ServerArgs` would import torch
and take seconds.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

from milepost.errors import ConfigError, Problem

TESTED_VERSION = "0.5.17"
"""Version of SGLang that the tests run with."""

SPARE_POSITIONS = 8
"""SGLang keeps up to 7 positions of its context for itself; it is told of so many more than milepost uses."""

CPU_DEFAULTS: Mapping[str, Any] = {
    "attention_backend": "torch_native",
    "disable_cuda_graph": True,
    "grammar_backend": "none",
    "mem_fraction_static": 0.1,
    "sampling_backend": "pytorch",
}
"""Without kernels for it, SGLang decodes on a CPU in plain torch."""

CPU_CACHE_TOKENS = 65536
"""Most entries of the KV cache on a CPU, unless `max_total_tokens` is given."""

GPU_DEFAULTS: Mapping[str, Any] = {"enable_memory_saver": True}
"""Without the memory saver an engine cannot release memory to a trainer on its own GPUs."""

ELSEWHERE: Mapping[str, str] = {
    "model_path": "model.path",
    "tokenizer_path": "model.path",
    "trust_remote_code": "model.trust_remote_code",
    "dtype": "model.dtype",
    "device": "run.device",
    "random_seed": "run.seed",
    "context_length": "rollout.max_context_len",
    "max_running_requests": "engine.max_running_requests",
    "tp_size": "engine.gpus_per_engine",
}
"""Options that another key of the run config decides."""

MILEPOSTS: Mapping[str, str] = {
    "host": "the launcher decides where an engine listens",
    "port": "the launcher decides where an engine listens",
    "nccl_port": "the launcher decides where an engine's ranks meet",
    "base_gpu_id": "the launcher decides which GPUs an engine has",
    "custom_weight_loader": "milepost's receiver takes the weights in",
    "weight_version": "the version is that of the last push",
    "skip_tokenizer_init": "stop strings need the tokenizer",
    "api_key": "milepost's requests carry none",
    "admin_api_key": "milepost's requests carry none",
    "checkpoint_engine_wait_weights_before_ready": "milepost pushes weights itself",
    "weight_cache_mode": "pushed weights cannot be shared with a cache",
}
"""Options that are not the user's, and why."""


@lru_cache(maxsize=1)
def server_options() -> frozenset[str]:
    """Return the names of the options that the installed SGLang's servers take.

    Raises ConfigError if SGLang is not installed, or is no version whose options can be read.
    """
    spec = util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        message = (
            "sglang was given, but SGLang is not installed here; install milepost[sglang] on a machine with a GPU, run "
            "scripts/install_sglang_cpu.sh for a CPU, or use engine.backend: local"
        )
        raise ConfigError([Problem("engine.backend", message)])
    source = Path(spec.submodule_search_locations[0]) / "srt" / "server_args.py"
    classes = [
        node
        for node in (ast.parse(source.read_text(encoding="utf-8")).body if source.is_file() else [])
        if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"
    ]
    if not classes:
        message = (
            f"the installed SGLang {metadata.version('sglang')} has no ServerArgs in {source}; install sglang=="
            f"{TESTED_VERSION}, which milepost is tested with"
        )
        raise ConfigError([Problem("engine.backend", message)])
    return frozenset(
        node.target.id
        for node in classes[0].body
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and not node.target.id.startswith("_")
        and not ast.unparse(node.annotation).startswith("ClassVar")
    )


def check_options(options: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each of `engine.options` that SGLang does not have or that is decided elsewhere.

    Raises as `server_options`.
    """
    known = server_options()
    problems = []
    for name in options:
        path = f"engine.options.{name}"
        if name in ELSEWHERE:
            problems.append(Problem(path, f"is decided by {ELSEWHERE[name]}; give that instead"))
        elif name in MILEPOSTS:
            problems.append(Problem(path, f"is not to be given: {MILEPOSTS[name]}"))
        elif name not in known:
            close = difflib.get_close_matches(name.replace("-", "_"), known - ELSEWHERE.keys() - MILEPOSTS.keys(), n=1)
            hint = f"did you mean {close[0]!r}?" if close else "see `python -m sglang.launch_server --help`."
            problems.append(Problem(path, f"SGLang {metadata.version('sglang')} has no such option; {hint}"))
    return problems


def server_arguments(
    *,
    model_path: Path,
    device: str,
    dtype: str,
    max_positions: int,
    max_running_requests: int,
    tensor_parallel: int = 1,
    seed: int = 0,
    trust_remote_code: bool = False,
    colocated: bool = True,
    options: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return what `ServerArgs` of one engine is made with, but for host and port; plain JSON data.

    `device` is `cpu` or `cuda`, `dtype` as in `str(dtype)` without `torch.`, `max_positions` the longest context;
    `colocated` says that the trainer wants the engine's memory while it sleeps.
    Raises ConfigError for options that SGLang does not have or that are not to be given.
    """
    from milepost.weights.sglang import LOADER  # brings torch; checking options does not

    if problems := check_options(options or {}):
        raise ConfigError(problems)
    arguments: dict[str, Any] = dict(CPU_DEFAULTS if device == "cpu" else GPU_DEFAULTS if colocated else {})
    if device == "cpu":
        arguments["max_total_tokens"] = min(CPU_CACHE_TOKENS, max_running_requests * (max_positions + SPARE_POSITIONS))
    return arguments | {
        "log_level_http": "warning",
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # it would spin on a core while the trainer computes
        **(options or {}),
        "model_path": str(model_path),
        "trust_remote_code": trust_remote_code,
        "dtype": dtype,
        "device": device,
        "random_seed": seed,
        "context_length": max_positions + SPARE_POSITIONS,
        "max_running_requests": max_running_requests,
        "tp_size": tensor_parallel,
        "custom_weight_loader": [LOADER],
    }
