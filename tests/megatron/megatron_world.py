"""Worlds of CPU ranks for tests: each call of `run_world` forks its ranks from a process that has imported Megatron."""

from __future__ import annotations

import gc
import os
import queue
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from forked import forked

TIMEOUT = 90.0


def _rank_main(function: Callable[..., Any], rank: int, world: int, store: str, results: Any, args: Any) -> None:
    import torch
    import torch.distributed as dist

    # What came with the fork is shared memory; a collection would touch, and so copy, all of it.
    gc.freeze()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timedelta(seconds=60)
        )
        results.put((rank, function(rank, *args), None))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - told to the test, which raises it
        results.put((rank, None, traceback.format_exc()))


def run_world(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """Run `function(rank, *args)` on every rank of a world and return the results in rank order.

    The function is one of a module; results are plain data. Raises AssertionError with the first rank's traceback.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    context = forked()
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        ranks = [
            context.Process(target=_rank_main, args=(function, rank, world, store, results, args))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        found: dict[int, Any] = {}
        try:
            while len(found) < world:
                try:
                    rank, result, error = results.get(timeout=TIMEOUT)
                except queue.Empty as empty:
                    raise AssertionError(f"ranks {sorted(set(range(world)) - set(found))} did not answer") from empty
                assert error is None, f"rank {rank} of {world}:\n{error}"
                found[rank] = result
            for process in ranks:
                process.join(timeout=30)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
    return [found[rank] for rank in range(world)]
