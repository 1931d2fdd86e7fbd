"""The promises of a weight transport, tried on engines that remember what they were given."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor

from milepost.alarm import TimeIsUpError, time_limit
from milepost.components import Component, Transport, TransportTraits
from milepost.errors import TransportError
from milepost.testing.engines import CountingSource, RecordingEngine, Source, in_this_process, make_weights, same_bits
from milepost.testing.findings import Finding, Findings, find_subject
from milepost.weights.transport import Address, EngineInfo, PushReport, RankInfo, WeightSource, World

NUM_ENGINES = 2
TIME_LIMIT = 60.0
"""Seconds after which a push counts as hanging."""
Reach = Callable[[RecordingEngine, int], AbstractContextManager[EngineInfo]]
"""Makes an engine reachable under an index while a `with` block runs, and says where."""


def check_transport(
    transport: str | Component[Transport] | Transport,
    options: Mapping[str, Any] | None = None,
    *,
    traits: TransportTraits | None = None,
    reach: Reach = in_this_process,
    timeout: float = TIME_LIMIT,
) -> list[Finding]:
    """Try every promise of a transport and return those that were not kept.

    - The address survives pickling and JSON.
    - A push carries every tensor to every engine, bit for bit (bfloat16, NaN, scalars and views included), with and
      without `verify`; the engines then serve its version, and the report says what it was.
    - A second push replaces the first. A push that names some engines leaves the others serving what they had.
    - Every rank takes part, also one that sends nothing.
    - A sender that dies, an engine that dies or is gone, a tensor that was announced and does not come or that comes
      otherwise: each is an error, TransportError where an engine did not commit. No engine ever serves a part of a
      push; one that had begun to receive stays fenced until a whole push has gone through, which then works.
    - An engine that the transport was not opened with is an error.
    - Options survive pickling and JSON.

    Args:
        transport: registered name, component, or a built transport.
        options: of the component.
        traits: of a built transport; taken from the component otherwise.
        reach: where the engines are; default this process, at `local:NAME`. A transport between processes brings a
            context manager that makes an engine reachable and yields its `EngineInfo`.
        timeout: seconds one push may take.

    Returns:
        Findings; empty where all promises are kept.

    Raises:
        PluginError: there is no such component, or it cannot be built.
        ValueError: options were given beside a built transport.
    """
    subject = find_subject("transport", transport, options)
    known = subject.traits if isinstance(subject.traits, TransportTraits) else traits or TransportTraits()
    findings = Findings()
    findings.check_options(subject)
    check = _Check(findings, subject.built, known, reach, timeout)
    if check.opens():
        for verify in (False, True):
            check.round_trip(verify)
        check.subset()
        check.idle_ranks()
        check.dead_senders()
        check.partial_pushes()
        check.dead_engines()
        check.unknown_engines()
    return list(findings)


class _Bench:
    """Engines, a transport opened with them, and pushes from one rank."""

    def __init__(self, check: _Check, closing: ExitStack, *, num_ranks: int = 1, verify: bool = False) -> None:
        names = list(make_weights(0))
        self.timeout = check.timeout
        self.transport = check.transport
        self.engines = [RecordingEngine(names) for _ in range(NUM_ENGINES)]
        self.sites = [closing.enter_context(ExitStack()) for _ in self.engines]
        infos = [
            site.enter_context(check.reach(engine, index))
            for index, (site, engine) in enumerate(zip(self.sites, self.engines, strict=True))
        ]
        world = World(tuple(RankInfo(rank, data=rank) for rank in range(num_ranks)))
        self.address: Address = replace(self.transport.open(world, infos), verify=verify)

    def push(
        self, version: int, source: WeightSource, engines: Collection[int] | None = None, rank: int = 0
    ) -> PushReport:
        """Push from one rank. Raises TimeoutError if it hangs."""
        try:
            with time_limit(self.timeout):
                return self.transport.sender(self.address, rank).push(version, source, engines)
        except TimeIsUpError as error:
            raise TimeoutError(f"the push {error}") from None

    def state(self, index: int, pushed: Mapping[int, Mapping[str, Tensor]]) -> str:
        """Say what an engine does: `fenced`, `serves VERSION`, or what is wrong with what it serves."""
        engine = self.engines[index]
        if engine.fenced:
            return "fenced"
        wrong = same_bits(engine.served, pushed.get(engine.version, {}))
        return f"serves {engine.version}" + (f" with other bits in {', '.join(wrong)}" if wrong else "")


@dataclass(frozen=True, slots=True)
class _Check:
    """One transport between a rank and two engines."""

    findings: Findings
    transport: Transport
    traits: TransportTraits
    reach: Reach
    timeout: float

    def opens(self) -> bool:
        """Check the address; False if there is none."""
        promise, case = "address", f"{NUM_ENGINES} engines and two ranks"
        before = len(self.findings)
        with self.findings.surviving(promise, case), ExitStack() as closing:
            address = _Bench(self, closing, num_ranks=2).address
            again = pickle.loads(pickle.dumps(address))
            self.findings.require(again == address, promise, case, "an equal address after pickling", again)
            plain = asdict(address)
            back = json.loads(json.dumps(plain))
            self.findings.require(
                back["details"] == plain["details"],
                promise,
                case,
                f"details {plain['details']} after JSON",
                back["details"],
            )
        return len(self.findings) == before

    def round_trip(self, verify: bool) -> None:
        """Check two pushes to all engines."""
        promise, how = "bit-exact round trip", "with verify" if verify else "without verify"
        pushed = {version: make_weights(version) for version in (3, 4)}
        with self.findings.surviving(promise, how), ExitStack() as closing:
            bench = _Bench(self, closing, verify=verify)
            for version, weights in pushed.items():
                case = f"version {version}, {how}"
                report = bench.push(version, Source(weights))
                for index in range(NUM_ENGINES):
                    self._expect(promise, f"{case}, engine {index}", f"serves {version}", bench.state(index, pushed))
                size = NUM_ENGINES * sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
                expected = (version, size, tuple(range(NUM_ENGINES)))
                got = (report.version, report.num_bytes, tuple(sorted(report.engines)))
                self._expect(
                    "report", case, f"version, bytes and engines {expected}", f"version, bytes and engines {got}"
                )
                self.findings.require(report.seconds > 0, "report", case, "seconds above 0", report.seconds)

    def subset(self) -> None:
        """Check a push to one engine of two."""
        promise, case = "engines by name", "version 2 to engine 1 alone, after version 1 to both"
        pushed = {version: make_weights(version) for version in (1, 2)}
        with self.findings.surviving(promise, case), ExitStack() as closing:
            bench = _Bench(self, closing)
            bench.push(1, Source(pushed[1]))
            report = bench.push(2, Source(pushed[2]), [1])
            self._expect(promise, f"{case}, engine 0", "serves 1", bench.state(0, pushed))
            self._expect(promise, f"{case}, engine 1", "serves 2", bench.state(1, pushed))
            self._expect(promise, f"{case}, report", "engines (1,)", f"engines {tuple(report.engines)}")

    def idle_ranks(self) -> None:
        """Check that every rank of two takes part in gathering, whoever sends."""
        promise, case = "every rank takes part", "a push from two ranks"
        pushed = {1: make_weights(1)}
        with self.findings.surviving(promise, case), ExitStack() as closing:
            bench = _Bench(self, closing, num_ranks=2)
            sources = [CountingSource(pushed[1]) for _ in range(2)]
            with ThreadPoolExecutor(2) as ranks:
                pushes = [ranks.submit(bench.push, 1, source, None, rank) for rank, source in enumerate(sources)]
                reports = [push.result(timeout=self.timeout) for push in pushes]
            for index in range(NUM_ENGINES):
                self._expect(promise, f"{case}, engine {index}", "serves 1", bench.state(index, pushed))
            served = sorted(index for report in reports for index in report.engines)
            self._expect("report", case, f"each engine in one report, {[0, 1]}", f"each engine in one report, {served}")
            if self.traits.tensors == "full":
                counts = [source.reads for source in sources]
                self._expect(promise, case, f"tensors read {[len(pushed[1])] * 2}", f"tensors read {counts}")

    def dead_senders(self) -> None:
        """Check that a push whose source fails is an error, is not served, and can be made good."""
        pushed = {version: make_weights(version) for version in (1, 2, 3)}
        for after in (0, len(pushed[2]) // 2, len(pushed[2]) - 1):
            case = f"a sender that dies after {after} of {len(pushed[2])} tensors"
            with self.findings.surviving("dead sender", case), ExitStack() as closing:
                bench = _Bench(self, closing)
                bench.push(1, Source(pushed[1]))
                self._fails("dead sender", case, OSError, bench, Source(pushed[2]).failing(after))
                self._not_served(bench, case, pushed, may_serve=1 if after == 0 else None)
                bench.push(3, Source(pushed[3]))
                for index in range(NUM_ENGINES):
                    where = f"a whole push after {case}, engine {index}"
                    self._expect("dead sender", where, "serves 3", bench.state(index, pushed))

    def partial_pushes(self) -> None:
        """Check that what comes is held against what was announced."""
        pushed = {version: make_weights(version) for version in (1, 2)}
        weights = pushed[2]
        without = {name: tensor for name, tensor in weights.items() if name != "scalar"}
        lies = {
            "an announced tensor that does not come": Source(without, weights),
            "a tensor that was not announced": Source(weights, without),
            "a tensor of another shape": Source(weights, weights | {"larger": weights["larger"].t()}),
            "a tensor of another dtype": Source(weights, weights | {"float16": weights["float16"].bfloat16()}),
        }
        for case, source in lies.items():
            with self.findings.surviving("manifest", case), ExitStack() as closing:
                bench = _Bench(self, closing)
                bench.push(1, Source(pushed[1]))
                self._fails("manifest", case, TransportError, bench, source)
                self._not_served(bench, case, {1: pushed[1]})

    def dead_engines(self) -> None:
        """Check engines that are gone, that die while they receive, and whose model is another."""
        pushed = {version: make_weights(version) for version in (1, 2, 3)}
        kills: dict[str, Callable[[_Bench], object]] = {
            "an engine that is gone": lambda bench: bench.sites[0].close(),
            "an engine that dies while it receives": lambda bench: setattr(bench.engines[0], "dies_after", 3),
            "an engine with another model": lambda bench: setattr(bench.engines[0], "names", frozenset({"other"})),
        }
        for case, kill in kills.items():
            with self.findings.surviving("dead engine", case), ExitStack() as closing:
                bench = _Bench(self, closing)
                bench.push(1, Source(pushed[1]))
                kill(bench)
                self._fails("dead engine", case, Exception, bench, Source(pushed[2]))
                gone = case == "an engine that is gone"
                allowed = ("fenced", "serves 1") if gone else ("fenced",)
                state = bench.state(0, {1: pushed[1]})
                self.findings.require(state in allowed, "dead engine", f"{case}, engine 0", " or ".join(allowed), state)
                # The other may have been served, or not; never a part.
                state, whole = bench.state(1, pushed), ("fenced", "serves 1", "serves 2")
                self.findings.require(
                    state in whole, "no part is served", f"{case}, engine 1", " or ".join(whole), state
                )
                bench.push(3, Source(pushed[3]), [1])
                self._expect("dead engine", f"a push to the other after {case}", "serves 3", bench.state(1, pushed))

    def unknown_engines(self) -> None:
        """Check that engines are those the transport was opened with."""
        promise, case = "engines by name", "a push to engine 7, of which the transport was not told"
        with self.findings.surviving(promise, case), ExitStack() as closing:
            bench = _Bench(self, closing)
            self._fails(promise, case, TransportError, bench, Source(make_weights(1)), [7])
            for index in range(NUM_ENGINES):
                receiver = self.transport.receiver(bench.address, index)
                acts = [act for act in ("prepare", "receive", "commit") if not hasattr(receiver, act)]
                sound = receiver is None or not acts
                expected = "None, or an object with prepare, receive and commit"
                self.findings.require(sound, "receiver", f"engine {index}", expected, f"one without {', '.join(acts)}")

    def _fails(
        self,
        promise: str,
        case: str,
        expected: type[Exception],
        bench: _Bench,
        source: WeightSource,
        engines: Sequence[int] | None = None,
    ) -> None:
        """Require that a push of version 2 raises; a TransportError is right whatever else would be."""
        try:
            bench.push(2, source, engines)
            got = "no exception"
        except TimeoutError as error:
            got = f"TimeoutError: {error}"
        except (expected, TransportError):
            return
        except Exception as error:  # noqa: BLE001 - the check outlives what it checks, and reports it
            got = f"{type(error).__name__}: {error}"
        wanted = "an exception" if expected is Exception else f"{expected.__name__}"
        self.findings.append(Finding(promise, case, wanted, got))

    def _not_served(
        self, bench: _Bench, case: str, pushed: Mapping[int, Mapping[str, Tensor]], may_serve: int | None = None
    ) -> None:
        """Require that both engines are fenced; before anything was sent they may serve what they had."""
        allowed = ["fenced"] + ([] if may_serve is None else [f"serves {may_serve}"])
        for index in range(NUM_ENGINES):
            state = bench.state(index, pushed)
            self.findings.require(
                state in allowed, "no part is served", f"{case}, engine {index}", " or ".join(allowed), state
            )

    def _expect(self, promise: str, case: str, expected: str, got: str) -> None:
        self.findings.require(expected == got, promise, case, expected, got)
