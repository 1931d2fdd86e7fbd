"""The transport `ipc`: weights stay on the device where trainer and engines share it.

Engines of the trainer's own process (`local:NAME`) are given the trainer's tensors by reference and copy them; engines
of another process of the node (`unix://NODE/PATH`) copy them out of memory that both map (on a GPU by CUDA IPC).
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
    """How much is handed over at a time."""

    bucket_mb: Annotated[int, Field(gt=0)] = 512
    """Megabytes of gathered tensors that wait for each other before they are handed over."""


def build(options: Options) -> Transport:
    """Build the transport."""
    from milepost_ipc.transport import IpcTransport

    return IpcTransport(options.bucket_mb * 2**20)


@milepost.hookimpl
def milepost_transports() -> Iterable[TransportComponent]:
    """Provide the transport."""
    traits = TransportTraits(colocated="required", tensors="full")
    summary = "Hands weights over in memory that trainer and engines share, within a process or a node."
    return [milepost.Component("ipc", Options, traits, build, summary)]
