"""A Ray cluster on this machine that several runs may use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

NUM_CPUS = 4

HEAD = f"""
import functools
import sys
import tempfile
import ray
import ray._private.parameter as parameter
from ray._private.utils import write_ray_address
# One agent on a machine gets the port that all ask for; what it serves, jobs, is refused by the others.
parameter.RayParams = functools.partial(parameter.RayParams, dashboard_agent_listen_port=0)
dashboard = "--dashboard" in sys.argv
with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
    context = ray.init(
        address="local", num_cpus={NUM_CPUS}, include_dashboard=dashboard, log_to_driver=False, _temp_dir=folder
    )
    address = context.address_info["gcs_address"]
    # As `ray start` does. Jobs go to the cluster that is written here, or else to any that is found on the machine.
    write_ray_address(address, folder)
    print(context.dashboard_url if dashboard else address, flush=True)
    sys.stdin.read()
    ray.shutdown()
"""


def ray_environment(address: str | None = None) -> dict[str, str]:
    """Return the environment of a run that joins the cluster at an address, or starts one of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    # Ray asks for a token on clusters that it starts by itself, and for saying so when one is joined.
    # Its workers have a low priority otherwise, and hardly get a core beside other tests.
    environment |= {"OMP_NUM_THREADS": "1", "RAY_AUTH_MODE": "token", "RAY_worker_niceness": "0"}
    return environment if address is None else environment | {"RAY_ADDRESS": address}


@contextmanager
def started(*, dashboard: bool = False) -> Iterator[str]:
    """Start a cluster with `NUM_CPUS` slots for ranks, give its address or that of its dashboard, and end it."""
    process = subprocess.Popen(
        [sys.executable, "-c", HEAD, *(["--dashboard"] if dashboard else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ray_environment(),
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    address = process.stdout.readline().strip()
    assert address, process.stderr.read()
    yield address
    process.stdin.close()
    assert process.wait(timeout=120) == 0
