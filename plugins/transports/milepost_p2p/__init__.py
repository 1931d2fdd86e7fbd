"""The transport `p2p`: each rank writes weights into memory that engines on other devices have registered.

Bytes go through Mooncake's transfer engine, over RDMA where there is, else over TCP.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import milepost
from milepost.components import TransportComponent, TransportTraits
from pydantic import Field

if TYPE_CHECKING:
    from milepost.components import Transport
    from milepost.config.plan import Plan

REMEDY = (
    "pip install 'milepost[p2p]' and, on Debian, apt-get install libibverbs1 librdmacm1 libnuma1 liburing2 libcurl4"
)


class Options(milepost.Options):
    """How bytes travel, how many at a time, and how long anything may take."""

    protocol: Literal["auto", "rdma", "tcp"] = "auto"
    """`rdma` or `tcp`; `auto` is RDMA where the trainer's node has a device for it."""
    bucket_mb: Annotated[int, Field(gt=0)] = 512
    """Megabytes of gathered tensors that are written together; an engine's ranks register that much memory each."""
    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that reaching an engine, or writing one bucket, may take before the push counts as failed."""


def build(options: Options) -> Transport:
    """Build the transport."""
    from milepost_p2p.transport import P2PTransport

    return P2PTransport(options.protocol, options.bucket_mb * 2**20, options.timeout)


def check(plan: Plan, options: Any) -> Iterable[str]:
    """Say what is missing to run it; the libraries that Mooncake needs are looked for when it is first used."""
    del plan, options
    if find_spec("mooncake") is None:
        yield f"transport 'p2p' needs Mooncake's transfer engine, which is not installed; {REMEDY}"


@milepost.hookimpl
def milepost_transports() -> Iterable[TransportComponent]:
    """Provide the transport."""
    traits = TransportTraits(colocated="forbidden", tensors="full", check=check)
    summary = "Writes weights into registered memory of engines on devices of their own, over RDMA or TCP."
    return [milepost.Component("p2p", Options, traits, build, summary)]
