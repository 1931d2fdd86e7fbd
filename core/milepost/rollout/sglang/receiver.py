"""The engine side of a push, inside a SGLang server, called through its `custom_weight_loader`.

Every act of a push is one call of `load`. It never raises, which would end the server: what went wrong is written into
the verdict at the front of the buffer that came with the call (see `milepost.weights.sglang`), and the push is refused
from then on. The server is fenced by its weight version, which the sender sets.

A sender on another device sends no buffer: the call carries a header alone, bytes come through an intake
(`milepost.weights.intake`), and the answer goes to the sender's store (`milepost.weights.lines`).
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from milepost.errors import TransportError
from milepost.rollout.sglang.routes import Recorder, Route, play
from milepost.weights import intake, lines
from milepost.weights.sglang import ACCEPTED, REFUSED, VERDICT_BYTES, Slot, manifest_of, write_verdict
from milepost.weights.transport import Manifest, TensorSpec, digest


class Loadable(Protocol):
    """What SGLang's models have."""

    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> object:
        """Put Hugging Face tensors into the parameters; names it does not know are skipped."""
        ...


REPLY_SECONDS = 30.0
"""How long the sender's store may take to be reached."""


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Do one act of a push; the only tensor is the buffer, and its name is the header."""
    [(text, buffer)] = named_tensors
    header = json.loads(text)
    receiver = _receivers.get(model)
    if receiver is None:
        receiver = _receivers[model] = ModelReceiver(model)
    answer: intake.Message = {}
    status, message = ACCEPTED, ""
    try:
        answer = receiver.act(header, buffer)
    except TransportError as error:
        status, message = REFUSED, str(error)
    except Exception:  # noqa: BLE001 a loader may raise anything; it reaches the sender as the verdict
        status, message = REFUSED, traceback.format_exc()[-VERDICT_BYTES // 2 :]
    if "reply" not in header:
        write_verdict(buffer[header["verdict"] : header["verdict"] + VERDICT_BYTES], status, message)
        if buffer.is_cuda:
            torch.cuda.synchronize(buffer.device)  # the sender writes into the buffer as soon as this returns
        return
    try:
        lines.reply(header["reply"], status, message, answer, REPLY_SECONDS)
    except RuntimeError as error:
        # The sender is gone, so nobody waits for the answer, and raising would end the server. It stays fenced.
        print(f"milepost: no answer could be given at {header['reply'][:2]}: {error}; {message}", file=sys.stderr)


class ModelReceiver:
    """Takes pushes into one model (on tensor-parallel engines: into one rank's part of it)."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._intakes = intake.Intakes(next(model.parameters()).device)
        self._routes: dict[str, list[Route]] = {}
        """Of every tensor that only copies take in."""
        self._specs: dict[str, TensorSpec] = {}
        """Shape and dtype the routes were found with."""
        self._manifest: Manifest | None = None
        self._expected: dict[str, TensorSpec] = {}
        self._wanted: list[tuple[str, Route, str]] = []
        """When verifying: tensor, destination and the digest of what must stand there at the commit."""

    def act(self, header: Mapping[str, Any], buffer: Tensor) -> intake.Message:
        """Do what a header says, and return what there is to answer.

        Raises TransportError for what is refused; the push is then over.
        """
        try:
            match header["act"]:
                case "prepare":
                    self.prepare(manifest_of(header["manifest"]))
                case "load":
                    self.take(buffer, _slots(header))
                case "probe" | "open":
                    return intake.act(self._intakes, {**header, "op": header["act"]})
                case "fill":
                    bucket = self._intakes.take(header["channel"], header["bytes"])
                    self.take(bucket, _slots(header))
                    if bucket.is_cuda:
                        torch.cuda.synchronize(bucket.device)  # the next bucket comes on another stream
                case _:
                    self.commit(header["version"])
        except BaseException:
            self._manifest = None
            raise
        return {}

    def prepare(self, manifest: Manifest) -> None:
        """Expect these tensors."""
        self._manifest = manifest
        self._expected = {spec.name: spec for spec in manifest.tensors}
        self._wanted = []

    def take(self, buffer: Tensor, slots: Sequence[Slot]) -> None:
        """Check tensors against the manifest and put them into the model."""
        if self._manifest is None:
            raise TransportError("tensors came without a push, or after one of its acts was refused; prepare again")
        tensors = [(slot.name, slot.view(buffer)) for slot in slots]
        specs = [self._check(name, tensor) for name, tensor in tensors]
        if all(name in self._routes and self._fits(name, tensor) for name, tensor in tensors):
            play(self._routes, tensors)
        else:
            self._load_and_watch(buffer, slots, tensors)
        for spec, (name, tensor) in zip(specs, tensors, strict=True):
            if spec.digest is not None:
                self._want(name, tensor)

    def commit(self, version: int) -> None:
        """Check that all of the push arrived and, when verifying, that it stands where it belongs."""
        manifest = self._manifest
        if manifest is None or manifest.version != version:
            begun = "none is under way" if manifest is None else f"version {manifest.version} was begun"
            raise TransportError(f"commit of version {version}, but {begun}")
        if self._expected:
            some = ", ".join(list(self._expected)[:3])
            raise TransportError(f"version {version} is incomplete: {len(self._expected)} tensors missing ({some})")
        for name, route, wanted in self._wanted:
            if digest(route.destination) != wanted:
                shape = list(route.destination.shape)
                raise TransportError(
                    f"tensor {name!r} differs in the engine from what was sent (its part of shape {shape})"
                )
        if self._wanted:
            self._check_coverage()
        self._manifest = None

    def _check(self, name: str, tensor: Tensor) -> TensorSpec:
        spec = self._expected.pop(name, None)
        if spec is None:
            raise TransportError(f"tensor {name!r} is not in the manifest, or came twice")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (tuple(tensor.shape), dtype) != (spec.shape, spec.dtype):
            raise TransportError(
                f"tensor {name!r} is {dtype}{list(tensor.shape)}, the manifest says {spec.dtype}{list(spec.shape)}"
            )
        if spec.digest is not None and digest(tensor) != spec.digest:
            raise TransportError(f"tensor {name!r} arrived with other bytes than were sent")
        return spec

    def _fits(self, name: str, tensor: Tensor) -> bool:
        known = self._specs[name]
        return (known.shape, known.dtype) == (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))

    def _load_and_watch(self, buffer: Tensor, slots: Sequence[Slot], tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Let the model take tensors in, and learn where it puts them."""
        model = cast("Loadable", self._model)
        recorder = Recorder(buffer, slots, self._model)
        try:
            with recorder, torch.no_grad():
                model.load_weights(tensors)
        except Exception as error:
            raise TransportError(self._blame(tensors, error)) from error
        homeless = [name for name, _ in tensors if name not in recorder.routes]
        if homeless and not recorder.num_opaque:
            raise TransportError(
                f"the engine's model has no place for tensor {homeless[0]!r} ({len(homeless)} such in this bucket); "
                "trainer and engine hold different architectures, or the recipe names it wrongly"
            )
        for slot in slots:
            if slot.name in recorder.routes:
                self._routes[slot.name] = recorder.routes[slot.name]
                self._specs[slot.name] = TensorSpec(slot.name, slot.shape, slot.dtype)

    def _blame(self, tensors: Sequence[tuple[str, Tensor]], error: Exception) -> str:
        """Find the tensor that the model's loader fails on, loading one after the other."""
        for name, tensor in tensors:
            try:
                with torch.no_grad():
                    cast("Loadable", self._model).load_weights([(name, tensor)])
            except Exception as single:  # noqa: BLE001 a loader may raise anything; it becomes the message
                shape = list(tensor.shape)
                return f"the engine's model cannot take tensor {name!r} of shape {shape}: {single!r}"
        return f"the engine's model cannot take the tensors together, though each alone: {error!r}"

    def _want(self, name: str, tensor: Tensor) -> None:
        routes = self._routes.get(name)
        if routes is None:
            raise TransportError(
                f"tensor {name!r} cannot be verified: the engine's model computes its parameters from it rather than "
                "copying it; set transport.verify: false"
            )
        self._wanted += [(name, route, digest(route.source(tensor).to(route.destination.dtype))) for route in routes]

    def _check_coverage(self) -> None:
        """Raise if a parameter got nothing from the push."""
        reached = {route.destination.untyped_storage().data_ptr() for _, route, _ in self._wanted}
        for name, parameter in self._model.named_parameters():
            if parameter.untyped_storage().data_ptr() not in reached:
                raise TransportError(f"no tensor of the push went into the engine's parameter {name!r}")


def _slots(header: Mapping[str, Any]) -> list[Slot]:
    return [Slot(**{**slot, "shape": tuple(slot["shape"])}) for slot in header["slots"]]


_receivers: WeakKeyDictionary[nn.Module, ModelReceiver] = WeakKeyDictionary()
