"""The engine side of a push inside this process, and where such engines are found.

An engine of this process registers under its name and is reached as `local:NAME`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from milepost.errors import MilepostError, TransportError
from milepost.weights.transport import Manifest, TensorSpec, digest

PREFIX = "local:"


class LoadTarget(Protocol):
    """What a push needs of an engine."""

    def fence(self) -> None:
        """Serve nothing until `serve`. Raises RuntimeError if that cannot be now."""
        ...

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Copy tensors in. Raises KeyError for an unknown name, ValueError for a wrong shape."""
        ...

    def serve(self, version: int) -> None:
        """Serve what was loaded. Raises KeyError, and stays fenced, if a tensor is missing."""
        ...


_targets: dict[str, LoadTarget] = {}


def local_endpoint(name: str) -> str:
    """Return the endpoint of the engine registered under this name."""
    return PREFIX + name


def register_target(name: str, target: LoadTarget) -> None:
    """Make an engine known to this process. Raises MilepostError if another one has the name."""
    if _targets.get(name, target) is not target:
        raise MilepostError(f"an engine named {name!r} is running in this process; stop it or choose another name")
    _targets[name] = target


def unregister_target(name: str) -> None:
    """Forget an engine."""
    _targets.pop(name, None)


def find_target(endpoint: str) -> LoadTarget:
    """Return the engine at `local:NAME`. Raises TransportError if this process has none there."""
    name = endpoint.removeprefix(PREFIX)
    if not endpoint.startswith(PREFIX) or name not in _targets:
        known = ", ".join(map(local_endpoint, sorted(_targets))) or "none"
        raise TransportError(
            f"no engine at {endpoint!r} in this process (there are: {known}); start it before the push"
        )
    return _targets[name]


class LocalReceiver:
    """Implements `milepost.weights.transport.Receiver` for an engine of this process."""

    def __init__(self, target: LoadTarget) -> None:
        self._target = target
        self._manifest: Manifest | None = None
        self._expected: dict[str, TensorSpec] = {}

    def prepare(self, manifest: Manifest) -> None:
        """Fence the engine and expect these tensors. Raises TransportError if the engine cannot be fenced now."""
        try:
            self._target.fence()
        except RuntimeError as error:
            raise TransportError(f"the engine takes no push: {error}") from error
        self._manifest = manifest
        self._expected = {spec.name: spec for spec in manifest.tensors}

    def receive(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Check tensors against the manifest and copy them into the engine.

        Raises TransportError for a tensor that was not announced, came twice, has another shape, dtype or digest than
        announced, or that the model does not have; the engine stays fenced.
        """
        if self._manifest is None:
            raise TransportError("tensors came without a push; call prepare first")
        for name, tensor in tensors:
            spec = self._expected.pop(name, None)
            if spec is None:
                raise TransportError(f"tensor {name!r} is not in the manifest, or came twice")
            given = TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            if (given.shape, given.dtype) != (spec.shape, spec.dtype):
                raise TransportError(
                    f"tensor {name!r} is {given.dtype}{list(given.shape)}, the manifest says "
                    f"{spec.dtype}{list(spec.shape)}"
                )
            if spec.digest is not None and digest(tensor) != spec.digest:
                raise TransportError(f"tensor {name!r} arrived with other bytes than were sent")
        try:
            self._target.load(tensors)
        except (KeyError, ValueError) as error:
            raise TransportError(f"the engine's model does not fit the push: {error.args[0]}") from error

    def commit(self, version: int) -> None:
        """Serve the new version. Raises TransportError, and the engine stays fenced, unless every tensor arrived."""
        manifest = self._manifest
        if manifest is None or manifest.version != version:
            begun = "none was begun" if manifest is None else f"version {manifest.version} was begun"
            raise TransportError(f"commit of version {version}, but {begun}")
        if self._expected:
            some = ", ".join(list(self._expected)[:3])
            raise TransportError(f"version {version} is incomplete: {len(self._expected)} tensors missing ({some})")
        self._manifest = None
        try:
            self._target.serve(version)
        except KeyError as error:
            raise TransportError(f"version {version} is incomplete: {error.args[0]}") from error
