"""The engine side of a push whose bytes come over a network.

An intake takes flat buckets of bytes in, whichever way its transport carries them; what is made of the bytes is the
engine's receiver's business, so every transport is held to one manifest and one commit. The engine's process builds an
intake when a sender asks it to, from the installed transport of that name: the kernel knows none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import Tensor

import milepost
from milepost.errors import TransportError

Message = dict[str, Any]
"""JSON data."""


class Intake(Protocol):
    """Takes buckets of bytes in, one at a time."""

    def open(self, message: Mapping[str, Any]) -> Message:
        """Do what the sender's side of the transport asks before it sends; the answer is for it.

        Raises TransportError if that cannot be done within the time that the message allows.
        """
        ...

    def take(self, num_bytes: int) -> Tensor:
        """Return the bucket that was sent: [num_bytes] uint8, valid until the next call.

        Raises TransportError if it does not come in time.
        """
        ...

    def close(self) -> None:
        """Let go of what `open` took."""
        ...


@runtime_checkable
class IntakeTransport(Protocol):
    """A transport with code of its own in the engine's process."""

    def intake(self, device: torch.device) -> Intake:
        """Return a new intake of an engine on this device."""
        ...


class Intakes:
    """The intakes of one engine (or of one rank of it), by channel: each source rank of the trainer has its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: dict[str, Intake] = {}

    def open(self, channel: str, transport: str, message: Mapping[str, Any]) -> Message:
        """Open a channel anew, with an intake of the installed transport of this name.

        Raises TransportError if it has none here, or as its `open` does.
        """
        self.close(channel)
        made = milepost.resolve("transport", transport, {})
        if not isinstance(made, IntakeTransport):
            raise TransportError(f"transport {transport!r} has no code for an engine's process; it needs `intake`")
        intake = made.intake(self._device)
        answer = intake.open(message)
        self._open[channel] = intake
        return answer

    def is_open(self, channel: str) -> bool:
        """Whether the channel was opened in this process and has not failed since."""
        return channel in self._open

    def take(self, channel: str, num_bytes: int) -> Tensor:
        """Return a bucket [num_bytes] uint8. A channel that fails is closed. Raises TransportError then."""
        if channel not in self._open:
            raise TransportError(f"bytes were sent through {channel!r}, which is not open in this engine's process")
        try:
            return self._open[channel].take(num_bytes)
        except TransportError:
            self.close(channel)
            raise

    def close(self, channel: str | None = None) -> None:
        """Close a channel, by default all."""
        for name in list(self._open) if channel is None else [channel]:
            intake = self._open.pop(name, None)
            if intake is not None:
                intake.close()


def act(intakes: Intakes, message: Mapping[str, Any]) -> Message:
    """Do an act that opens a channel or looks whether it is open."""
    channel = cast("str", message["channel"])
    if message["op"] == "probe":
        return {"open": intakes.is_open(channel)}
    return intakes.open(channel, message["transport"], message["message"])
