"""What a check reports, and what all checks share: the thing under check, comparing, and surviving what it raises."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from milepost.components import Component, Kind
from milepost.registry import current

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-5
"""Largest difference that rounding in float32 explains, relative to the largest number compared."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One promise that was not kept."""

    promise: str
    """Which one, for example `split invariance`."""
    case: str
    """The input it was tried on."""
    expected: str
    got: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.case}: expected {self.expected}, got {self.got}"


@dataclass(frozen=True, slots=True)
class Subject:
    """The thing under check."""

    built: Any
    traits: Any
    """Its component's traits; None where an object was given and no component."""
    options: BaseModel | None


def find_subject(kind: Kind, target: Any, options: Mapping[str, Any] | None) -> Subject:
    """Build what is to be checked: a registered name, a component, or an object that is built already.

    Raises PluginError for a name that cannot be had, pydantic's ValidationError for options that do not fit a
    component, ValueError for options beside an object.
    """
    if isinstance(target, str):
        target = current().get(kind, target).component
    if isinstance(target, Component):
        checked = target.options.model_validate(dict(options or {}))
        return Subject(target.build(checked), target.traits, checked)
    if options:
        raise ValueError(f"options {dict(options)} were given beside a built {kind}; build it with them, or name it")
    return Subject(target, None, None)


class Findings(list[Finding]):
    """Findings as they are gathered."""

    @contextmanager
    def surviving(self, promise: str, case: str) -> Iterator[None]:
        """Turn whatever the thing under check raises into a finding."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the check outlives what it checks, and reports it
            self.append(Finding(promise, case, "no exception", f"{type(error).__name__}: {error}"))

    def require(self, holds: bool, promise: str, case: str, expected: str, got: object) -> None:
        """Add a finding unless the promise holds."""
        if not holds:
            self.append(Finding(promise, case, expected, str(got)))

    def compare(self, promise: str, case: str, what: str, expected: Tensor, got: Tensor) -> None:
        """Add a finding, naming the first differing entry, unless two tensors agree to `TOLERANCE`."""
        if expected.shape != got.shape:
            self.append(Finding(promise, case, f"{what} of shape {tuple(expected.shape)}", f"{tuple(got.shape)}"))
            return
        if not expected.numel():
            return
        limit = TOLERANCE * max(float(expected.abs().max()), 1e-3)
        differs = ~((expected - got).abs() <= limit)
        if bool(differs.any()):
            place = int(differs.nonzero()[0])
            self.append(
                Finding(promise, case, f"{what} {float(expected[place]):.9g} at {place}", f"{float(got[place]):.9g}")
            )

    def compare_metrics(self, promise: str, case: str, expected: Mapping[str, float], got: Mapping[str, float]) -> None:
        """Add a finding per reduced metric that differs by more than `TOLERANCE`, relative to its own size."""
        if expected.keys() != got.keys():
            self.append(Finding(promise, case, f"metrics {sorted(expected)}", f"{sorted(got)}"))
            return
        for name, number in expected.items():
            limit = TOLERANCE * max(abs(number), 1e-3)
            close = abs(number - got[name]) <= limit or number == got[name]
            self.require(close, promise, case, f"metric {name!r} {number:.9g}", f"{got[name]:.9g}")

    def check_options(self, subject: Subject) -> None:
        """Workers get a component as kind, name and options, so options must survive pickling and JSON."""
        if subject.options is None:
            return
        promise, case = "picklable options", repr(subject.options)
        with self.surviving(promise, case):
            again = pickle.loads(pickle.dumps(subject.options))
            self.require(again == subject.options, promise, case, "equal options after pickling", repr(again))
        promise = "options as JSON"
        with self.surviving(promise, case):
            plain = json.loads(json.dumps(subject.options.model_dump(mode="json")))
            again = type(subject.options).model_validate(plain)
            self.require(again == subject.options, promise, case, "equal options after JSON", repr(again))
