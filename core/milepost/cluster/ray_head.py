"""A Ray cluster on this machine in a session of its own: `python -m milepost.cluster.ray_head SETTINGS`, a JSON object.

A signal to a run's process group (Ctrl-C in its terminal, the SIGTERM of a job scheduler) is to let the run finish its
step and save, and so must not end its ranks. The cluster ends when this process's stdin does, however the run ended.
"""

from __future__ import annotations

import json
import sys

import ray


def main() -> None:
    """Start the cluster with these arguments of `ray.init`, print where it is as JSON, and keep it until stdin ends."""
    context = ray.init(address="local", **json.loads(sys.argv[1]))
    print(json.dumps({"address": context.address_info["gcs_address"]}), flush=True)
    sys.stdin.read()
    ray.shutdown()


if __name__ == "__main__":
    main()
