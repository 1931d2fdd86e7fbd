"""The transport `broadcast`: weights go to engines on devices of their own, over NCCL, or over gloo on CPUs.

Each pipeline stage of the trainer has one rank that sends what the stage holds, in a process group with the engines.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import milepost
from milepost.components import TransportComponent, TransportTraits
from pydantic import Field

if TYPE_CHECKING:
    from milepost.components import Transport


class Options(milepost.Options):
    """How much is sent at a time, and how long anything may take."""

    bucket_mb: Annotated[int, Field(gt=0)] = 512
    """Megabytes of gathered tensors that are sent together; both ends hold two such buckets at most."""
    timeout: Annotated[float, Field(gt=0)] = 300.0
    """Seconds that forming a group, or one bucket, may take before the push counts as failed."""


def build(options: Options) -> Transport:
    """Build the transport."""
    from milepost_broadcast.transport import BroadcastTransport

    return BroadcastTransport(options.bucket_mb * 2**20, options.timeout)


@milepost.hookimpl
def milepost_transports() -> Iterable[TransportComponent]:
    """Provide the transport."""
    traits = TransportTraits(colocated="forbidden", tensors="full")
    summary = "Broadcasts weights to engines on devices of their own, over NCCL or gloo."
    return [milepost.Component("broadcast", Options, traits, build, summary)]
