"""The process of a SGLang server: `python -m milepost.rollout.sglang.launch ARGUMENTS PARENT`.

ARGUMENTS is a JSON object that `ServerArgs` is made with. When the process PARENT is gone, by whatever death, so is
this one with all it started: an engine never outlives its run and holds on to a GPU.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time

PARENT_CHECK_SECONDS = 1.0

# SGLang imports Megatron-core where it is installed, for a debugging tool, and Megatron-core then sets the memory saver
# to a mode in which CUDA graphs cannot give memory back: such a server dies while it starts.
sys.modules["megatron"] = None  # type: ignore[assignment]


def follow(parent: int) -> None:
    """Kill this process group as soon as `parent` is no longer its parent."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECK_SECONDS)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def fork_children() -> None:
    """Let SGLang's processes be copies of this one, which has imported everything already.

    Each of the two would spend ten seconds of a core on importing it again. SGLang asks for new processes because a
    CUDA context does not survive a fork; on a CPU there is none.
    """
    multiprocessing.set_start_method("fork")
    multiprocessing.set_start_method = lambda method, force=False: None  # what SGLang calls with "spawn"


def main() -> None:
    """Serve until killed."""
    arguments, parent = json.loads(sys.argv[1]), int(sys.argv[2])
    threading.Thread(target=follow, args=(parent,), name="follow parent", daemon=True).start()
    if arguments["device"] == "cpu":
        fork_children()

    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    if arguments["device"] == "cpu":
        # There SGLang collects garbage with every flush of its cache. All that was imported is none.
        gc.freeze()
    try:
        run_server(ServerArgs(**arguments))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


# Processes that SGLang spawns, as it does on a GPU, import this module again.
if __name__ == "__main__":
    main()
