"""Whether the transport p2p can run on this machine."""

from __future__ import annotations


def has_mooncake() -> bool:
    """Whether Mooncake and the libraries of the system that it needs are here."""
    try:
        import mooncake.engine  # noqa: F401
    except ImportError:
        return False
    return True
