"""Names of packages that are imported but never used when a language model is served on a CPU."""

from __future__ import annotations

from typing import NoReturn


class Absent(type):
    """A class that has every attribute and cannot be used."""

    def __getattr__(cls, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return absent(f"{cls.__name__}.{name}")

    def __call__(cls, *args: object, **kwargs: object) -> NoReturn:
        """Raise NotImplementedError."""
        raise NotImplementedError(f"{cls.__name__} was called, but its package is not installed; install it")


def absent(name: str) -> Absent:
    """Return a stand-in for something of this name. Raises NotImplementedError when it is called."""
    return Absent(name, (), {})
