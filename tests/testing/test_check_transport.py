"""The transport checks: `ipc` passes, and every way of breaking a promise is caught by name."""

from __future__ import annotations

import time
from copy import copy
from dataclasses import replace
from threading import Lock
from typing import Any

import pytest
from milepost.errors import TransportError
from milepost.testing import check_transport
from milepost.testing.engines import RecordingEngine
from milepost.weights.local import LocalReceiver, find_target
from milepost.weights.transport import Address, Manifest, PushReport


class Plain:
    """A sound transport that others here break in one place each."""

    address: Address
    rank: int

    def open(self, world: Any, engines: Any) -> Address:
        return Address("plain", tuple(engines), world)

    def sender(self, address: Address, rank: int) -> Any:
        made = copy(self)  # ranks push at the same time
        made.address, made.rank = address, rank
        return made

    def receiver(self, address: Address, engine: int) -> Any:
        return None

    def carried(self, name: str, tensor: Any) -> Any:
        return tensor

    def pick(self, engines: Any) -> list[Any]:
        known = {info.index: info for info in self.address.engines}
        wanted = sorted(known) if engines is None else sorted(engines)
        if set(wanted) - known.keys():
            raise TransportError(f"no engine among {wanted}")
        return [known[index] for index in wanted]

    def target(self, info: Any) -> Any:
        return LocalReceiver(find_target(info.endpoint))

    def push(self, version: int, source: Any, engines: Any = None) -> PushReport:
        started = time.perf_counter()
        infos = self.pick(engines) if self.rank == 0 else []
        receivers = [self.target(info) for info in infos]
        manifest = Manifest(version, tuple(source.specs()))
        for receiver in receivers:
            receiver.prepare(manifest)
        for name, tensor in source.tensors():
            for receiver in receivers:
                receiver.receive([(name, self.carried(name, tensor))])
        for receiver in receivers:
            receiver.commit(version)
        size = manifest.num_bytes * len(receivers)
        return PushReport(version, size, time.perf_counter() - started, tuple(info.index for info in infos))


class Unpicklable(Plain):
    def open(self, world: Any, engines: Any) -> Address:
        return replace(super().open(world, engines), details={"callback": lambda: None})


class NotJson(Plain):
    def open(self, world: Any, engines: Any) -> Address:
        return replace(super().open(world, engines), details={"ports": (1, 2)})


class Lossy(Plain):
    """Replaces what is not a number, as a careless conversion would."""

    def carried(self, name: str, tensor: Any) -> Any:
        return tensor.nan_to_num() if tensor.is_floating_point() else tensor


class Rounding(Plain):
    def carried(self, name: str, tensor: Any) -> Any:
        return tensor.half().to(tensor.dtype)


class Everyone(Plain):
    def pick(self, engines: Any) -> list[Any]:
        return list(self.address.engines)


class Idle(Plain):
    """A rank that sends nothing does not take part in gathering."""

    def push(self, version: int, source: Any, engines: Any = None) -> PushReport:
        return super().push(version, source, engines) if self.rank == 0 else PushReport(version, 0, 1e-6, ())


class Twice(Plain):
    """Every rank sends to every engine, one after the other."""

    def __init__(self) -> None:
        self.turn = Lock()

    def sender(self, address: Address, rank: int) -> Any:
        return super().sender(address, 0)

    def push(self, version: int, source: Any, engines: Any = None) -> PushReport:
        with self.turn:
            return super().push(version, source, engines)


class Swallowing(Plain):
    """Says that all is well whatever happened."""

    def push(self, version: int, source: Any, engines: Any = None) -> PushReport:
        try:
            return super().push(version, source, engines)
        except (OSError, TransportError, RuntimeError):
            return PushReport(version, 0, 1e-6, ())


class _Careless:
    """Serves whatever came, whenever the push ends."""

    def __init__(self, engine: RecordingEngine) -> None:
        self.engine = engine

    def prepare(self, manifest: Manifest) -> None:
        self.engine._incoming = dict(self.engine.served)

    def receive(self, tensors: Any) -> None:
        self.engine.served.update({name: tensor.clone() for name, tensor in tensors})

    def commit(self, version: int) -> None:
        self.engine.version, self.engine.fenced = version, False


class Careless(Plain):
    def target(self, info: Any) -> Any:
        return _Careless(find_target(info.endpoint))  # type: ignore[arg-type]


class Sleepy(Plain):
    def push(self, version: int, source: Any, engines: Any = None) -> PushReport:
        time.sleep(5)
        return super().push(version, source, engines)


class WrongReport(Plain):
    def push(self, version: int, source: Any, engines: Any = None) -> PushReport:
        return replace(super().push(version, source, engines), version=0)


class HalfReceiver(Plain):
    def receiver(self, address: Address, engine: int) -> Any:
        return object()


def test_sound_transports_pass() -> None:
    assert check_transport(Plain()) == []
    assert check_transport("ipc", {"bucket_mb": 1}) == []


@pytest.mark.parametrize(
    ("transport", "promise", "case"),
    [
        (Unpicklable(), "address", "2 engines and two ranks"),
        (NotJson(), "address", "2 engines and two ranks"),
        (Lossy(), "bit-exact round trip", "version 3, without verify, engine 0"),
        (Rounding(), "bit-exact round trip", "version 4, with verify, engine 1"),
        (Everyone(), "engines by name", "version 2 to engine 1 alone, after version 1 to both, engine 0"),
        (Everyone(), "engines by name", "a push to engine 7, of which the transport was not told"),
        (Idle(), "every rank takes part", "a push from two ranks"),
        (Twice(), "report", "a push from two ranks"),
        (Swallowing(), "dead sender", "a sender that dies after 3 of 7 tensors"),
        (Swallowing(), "dead engine", "an engine that is gone"),
        (Swallowing(), "manifest", "a tensor of another shape"),
        (Careless(), "manifest", "an announced tensor that does not come"),
        (Careless(), "no part is served", "a sender that dies after 3 of 7 tensors, engine 0"),
        (Sleepy(), "bit-exact round trip", "without verify"),
        (WrongReport(), "report", "version 3, without verify"),
        (HalfReceiver(), "receiver", "engine 0"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Plain) else None,
)
def test_a_broken_promise_is_found(transport: Plain, promise: str, case: str) -> None:
    timeout = 0.3 if isinstance(transport, Sleepy) else 30.0
    found = {(finding.promise, finding.case) for finding in check_transport(transport, timeout=timeout)}
    assert (promise, case) in found, sorted(found)


def test_what_was_lost_is_named() -> None:
    (finding, *_) = [f for f in check_transport(Lossy()) if f.promise == "bit-exact round trip"]
    assert (finding.expected, finding.got) == ("serves 3", "serves 3 with other bits in odd_numbers")
