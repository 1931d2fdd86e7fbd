"""Processes that are copies of one that has imported everything and done nothing else.

A new process would spend seconds of a core on imports; a fork of the tests' own process would inherit what earlier
tests left there. A store of torch's that one of them forgot, collected in such a fork, waits for a thread that is not
in it, for ever.
"""

from __future__ import annotations

import multiprocessing
from functools import cache
from multiprocessing.context import ForkServerContext

# One list for all: a process has one fork server, and what it imports is settled by whoever comes first.
PRELOADED = (
    "milepost.loop",
    "milepost.cli.train",
    "transformers.models.qwen3.modeling_qwen3",
    "megatron.core.dist_checkpointing",
    "milepost.training.megatron.trainer",
    "milepost_qwen3.recipe",
)


@cache
def forked() -> ForkServerContext:
    """Return the context that starts them; what they run is a function of a module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context
