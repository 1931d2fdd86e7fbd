"""How plugins are found, loaded and validated, each on its own.

A plugin is an entry point of the group `milepost`, or a hook module lying beside the run config. Whatever one of them
does while it is loaded or registered stays with it: the outcome is a `PluginRecord`, never an exception.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

import pluggy
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from milepost import hookspecs
from milepost.alarm import TimeIsUpError, time_limit
from milepost.components import KERNEL_KEYS, TRAITS, Component, Kind, ModelTraits
from milepost.entry_points import find_entries, normalise
from milepost.errors import PluginError
from milepost.hookspecs import GROUP

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

State = Literal["ok", "blocked", "broken", "conflicting"]

HOOKS: dict[str, Kind] = {
    "milepost_algorithms": "algorithm",
    "milepost_advantages": "advantage",
    "milepost_rewards": "reward",
    "milepost_models": "model",
    "milepost_transports": "transport",
}
"""Hook name to the kind of component it gives."""

LOCAL = "local"
"""Distribution name of hook modules that lie beside the run config."""

HEAVY = frozenset({"torch", "numpy", "ray", "sglang", "megatron", "transformers", "vllm", "sympy", "pandas"})
"""Packages that an entry-point module may not import: every command imports every plugin."""

SLOW_SECONDS = 1.0
"""A plugin whose import takes longer is pointed out."""

_COMPONENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")
_state = threading.local()


@dataclass(frozen=True, slots=True)
class Provided:
    """A component and where it comes from."""

    kind: Kind
    component: Component[Any]
    plugin: str
    """Entry-point name of the plugin, or name of the local module."""
    distribution: str
    """Distribution as it names itself; `local` for a module beside the run config."""
    version: str
    """Version of the distribution; for a local module its content hash."""
    origin: str
    """`DISTRIBUTION VERSION`, or `local:FILE (hash)`."""

    @property
    def name(self) -> str:
        """The component's name."""
        return self.component.name

    @property
    def label(self) -> str:
        """`DISTRIBUTION:NAME` of the plugin, as `--block` takes it."""
        return f"{self.distribution}:{self.plugin}"


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """One plugin that was found, and what became of it."""

    name: str
    """Entry-point name, or name of the local module."""
    distribution: str
    version: str
    origin: str
    state: State
    error: str = ""
    """Why the plugin is broken or conflicting."""
    traceback: str = ""
    """Traceback of what it raised; empty where the error says it all."""
    seconds: float = 0.0
    """Time its import and registration took."""
    heavy: tuple[str, ...] = ()
    """Heavy packages that its import brought into the process."""
    digest: str = ""
    """First 12 hex digits of the SHA-256 of a local module's source; empty for an installed plugin."""
    components: tuple[Provided, ...] = ()

    @property
    def label(self) -> str:
        """`DISTRIBUTION:NAME`, as `--block` takes it."""
        return f"{self.distribution}:{self.name}"

    @property
    def burdens(self) -> list[str]:
        """What makes every command slow for it: messages, empty for a plugin as it should be."""
        said = []
        if self.heavy:
            said.append(f"plugin {self.name} from {self.origin} imports {', '.join(self.heavy)}")
        if self.seconds > SLOW_SECONDS and self.state != "broken":
            said.append(f"plugin {self.name} from {self.origin} took {self.seconds:.1f} s to import")
        return [f"{message}; what is heavy belongs in the component's build" for message in said]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A plugin that was found and not yet imported."""

    name: str
    distribution: str
    version: str
    origin: str
    load: Callable[[], object]
    digest: str = field(default="", kw_only=True)

    def is_named_by(self, entry: str) -> bool:
        """Whether a block entry, NAME or DISTRIBUTION:NAME, means this plugin."""
        distribution, colon, name = entry.rpartition(":")
        if name != self.name:
            return False
        return not colon or normalise(distribution) == normalise(self.distribution)


class _RejectedError(Exception):
    """A plugin broke a rule of registration; the message says which, so no traceback is kept."""


def is_loading() -> bool:
    """Whether this thread is inside the import or registration of a plugin."""
    return getattr(_state, "loading", False)


def load_plugins(
    *,
    block: Sequence[str],
    modules: Sequence[str],
    base_dir: Path,
    discover: Callable[[], Iterable[EntryPoint]] | None,
    import_limit: float | None,
) -> tuple[list[PluginRecord], list[str]]:
    """Load every plugin that is not blocked; return a record for each, and warnings.

    Records come in the order distribution, name; local modules last, in the order given.
    """
    candidates = sorted(_installed(discover), key=lambda c: (normalise(c.distribution), c.name))
    candidates += [_local(name, base_dir) for name in dict.fromkeys(modules)]

    warnings = []
    for entry in dict.fromkeys(block):
        if not any(candidate.is_named_by(entry) for candidate in candidates):
            known = sorted(f"{c.distribution}:{c.name}" if ":" in entry else c.name for c in candidates)
            near = get_close_matches(entry, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            warnings.append(f"blocked plugin {entry!r} is not installed, so blocking it does nothing{hint}")

    records = []
    for candidate in candidates:
        if any(candidate.is_named_by(entry) for entry in block):
            records.append(_record(candidate, "blocked"))
        else:
            records.append(_load(candidate, import_limit))
    return records, warnings + [message for record in records for message in record.burdens]


def _installed(discover: Callable[[], Iterable[EntryPoint]] | None) -> Iterator[_Candidate]:
    if discover is None:
        for entry in find_entries(GROUP):
            yield _candidate(entry.name, entry.distribution, entry.version, entry.load)
    else:
        for given in discover():
            distribution, version = (given.dist.name, given.dist.version) if given.dist else ("unknown", "unknown")
            yield _candidate(given.name, distribution, version, given.load)


def _candidate(name: str, distribution: str, version: str, load: Callable[[], object]) -> _Candidate:
    return _Candidate(name, distribution, version, f"{distribution} {version}", load)


def _local(name: str, base_dir: Path) -> _Candidate:
    package, module = base_dir / name / "__init__.py", base_dir / f"{name}.py"
    if not name.isidentifier():
        problem = f"plugins.modules has {name!r}; expected the name of a module, as in `my_recipe` for my_recipe.py"
    elif package.is_file():
        digest = _digest(package.parent)
        return _Candidate(
            name, LOCAL, digest, f"local:{name}/ ({digest})", lambda: _import(name, package, digest), digest=digest
        )
    elif module.is_file():
        digest = _digest(module)
        return _Candidate(
            name, LOCAL, digest, f"local:{name}.py ({digest})", lambda: _import(name, module, digest), digest=digest
        )
    else:
        problem = f"plugins.modules has {name!r}, but there is neither {module} nor {package}; create one or remove it"

    def fail() -> object:
        raise _RejectedError(problem)

    return _Candidate(name, LOCAL, "unknown", f"local:{name}", fail)


def _digest(path: Path) -> str:
    """Hash a module's source, or all Python source of a package; 12 hex digits of the SHA-256."""
    if path.is_file():
        return hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    total = hashlib.sha256()
    for file in sorted(path.rglob("*.py")):
        content = file.read_bytes()
        total.update(f"{file.relative_to(path).as_posix()}\0{len(content)}\0".encode() + content)
    return total.hexdigest()[:12]


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles the source that was hashed; a bytecode cache, trusted by time stamp, could hold an older one."""

    def get_code(self, fullname: str) -> CodeType:
        return self.source_to_code(self.get_data(self.path), self.path)


def _import(name: str, path: Path, digest: str) -> ModuleType:
    # Named by content: the same source has the same name on every machine, so what it defines can be pickled across.
    private = f"_milepost_local_{digest}_{name}"
    loaded = sys.modules.get(private)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    _forget(private)
    locations = [str(path.parent)] if path.name == "__init__.py" else None
    loader = _SourceLoader(private, str(path))
    spec = importlib.util.spec_from_file_location(private, path, loader=loader, submodule_search_locations=locations)
    assert spec is not None, "a spec with a loader and a location always exists"
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module
    try:
        loader.exec_module(module)
    except BaseException:
        _forget(private)
        raise
    return module


def _forget(private: str) -> None:
    for name in [name for name in sys.modules if name == private or name.startswith(f"{private}.")]:
        del sys.modules[name]


@contextmanager
def _quarantine() -> Iterator[None]:
    """Keep what a plugin prints out of our own output, and mark this thread as loading."""
    before = is_loading()
    _state.loading = True
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _state.loading = before


def _load(candidate: _Candidate, import_limit: float | None) -> PluginRecord:
    started = time.perf_counter()
    before = HEAVY & sys.modules.keys()
    outcome: dict[str, Any]
    try:
        with _quarantine(), time_limit(import_limit):
            outcome = {"state": "ok", "components": _register(candidate, candidate.load())}
    except KeyboardInterrupt:
        raise
    except TimeIsUpError as error:
        outcome = {
            "state": "broken",
            "error": f"its import {error} and was stopped; what is heavy belongs in the component's build",
        }
    except (_RejectedError, pluggy.PluginValidationError) as error:
        outcome = {"state": "broken", "error": str(error)}
    except BaseException as error:  # noqa: BLE001  a plugin that raises anything at all must not take the rest along
        outcome = {
            "state": "broken",
            "error": "".join(traceback.format_exception_only(error)).strip(),
            "traceback": "".join(traceback.format_exception(error)),
        }
    outcome["seconds"] = time.perf_counter() - started
    outcome["heavy"] = tuple(sorted((HEAVY & sys.modules.keys()) - before))
    return _record(candidate, **outcome)


def _record(candidate: _Candidate, state: State, **outcome: Any) -> PluginRecord:
    return PluginRecord(
        candidate.name,
        candidate.distribution,
        candidate.version,
        candidate.origin,
        state,
        digest=candidate.digest,
        **outcome,
    )


def _register(candidate: _Candidate, plugin: object) -> tuple[Provided, ...]:
    """Let pluggy validate the plugin's hooks, call them, and check what they return."""
    # A manager of its own: names and modules of two plugins cannot collide, and nothing has to be undone on failure.
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin, name=f"{candidate.distribution}:{candidate.name}")
    manager.check_pending()

    provided: dict[tuple[Kind, str], Provided] = {}
    architectures: dict[str, str] = {}
    num_hooks = 0
    for hook, kind in HOOKS.items():
        implementations = getattr(manager.hook, hook).get_hookimpls()
        if not implementations and callable(getattr(plugin, hook, None)):
            raise _RejectedError(f"{hook} is not marked as a hook; put @milepost.hookimpl above it")
        for implementation in implementations:
            num_hooks += 1
            if implementation.wrapper or implementation.hookwrapper:
                raise _RejectedError(
                    f"{hook} is a hook wrapper; a plugin may only add components: return a list of them"
                )
            for component in _components(hook, kind, implementation.function()):
                if (kind, component.name) in provided:
                    raise _RejectedError(f"{kind} {component.name!r} is returned twice; give each a name of its own")
                for architecture in getattr(component.traits, "architectures", ()):
                    other = architectures.setdefault(architecture, component.name)
                    if other != component.name:
                        raise _RejectedError(
                            f"models {other!r} and {component.name!r} both serve {architecture!r}; keep one"
                        )
                provided[kind, component.name] = Provided(
                    kind, component, candidate.name, candidate.distribution, candidate.version, candidate.origin
                )
    if not num_hooks:
        raise _RejectedError(
            f"{_describe(plugin)} implements no hook; expected at least one of {', '.join(HOOKS)}, "
            "marked with @milepost.hookimpl"
        )
    return tuple(provided.values())


def _components(hook: str, kind: Kind, returned: object) -> Iterator[Component[Any]]:
    expected = "expected an iterable of milepost.Component records"
    if isinstance(returned, (str, bytes, Mapping)) or not isinstance(returned, Iterable):
        raise _RejectedError(f"{hook}() returned {_describe(returned)}; {expected}")
    for item in returned:
        if not isinstance(item, Component):
            raise _RejectedError(f"{hook}() returned an iterable holding {_describe(item)}; {expected}")
        if not isinstance(item.name, str) or not _COMPONENT_NAME.fullmatch(item.name):
            raise _RejectedError(
                f"{hook}() returned a component named {item.name!r}; "
                "expected letters, digits and . _ + -, beginning with a letter or digit"
            )
        for problem in _problems(kind, item):
            raise _RejectedError(f"{kind} {item.name!r}: {problem}")
        yield item


def _problems(kind: Kind, component: Component[Any]) -> Iterator[str]:
    """Say what is wrong with a component's fields; a plugin's author may not have a type checker."""
    options, traits = component.options, component.traits
    if not isinstance(traits, TRAITS[kind]):
        yield f"traits are {_describe(traits)}; expected a milepost.components.{TRAITS[kind].__name__}"
    if not callable(component.build):
        yield f"build is {_describe(component.build)}; expected a function of the options"
    if not isinstance(component.summary, str) or not component.summary.strip():
        yield f"summary is {component.summary!r}; expected one line saying what it does"
    if isinstance(traits, ModelTraits):
        names = traits.architectures
        if not isinstance(names, tuple) or not names or not all(isinstance(name, str) and name for name in names):
            yield f'architectures are {names!r}; expected a tuple of names such as ("Qwen3ForCausalLM",)'
    if not isinstance(options, type) or not issubclass(options, BaseModel):
        yield f"options are {_describe(options)}; expected a pydantic model class, derived from milepost.Options"
        return
    if options.model_config.get("extra") != "forbid" or not options.model_config.get("frozen"):
        yield (
            f"options model {options.__name__} would take unknown keys or can be changed; "
            'derive it from milepost.Options, or set model_config = ConfigDict(extra="forbid", frozen=True)'
        )
    for name, info in options.model_fields.items():
        for key in _keys(name, info):
            if key in KERNEL_KEYS[kind]:
                yield (
                    f"option {key!r} of {options.__name__} is a key of the kernel's own, the same for every {kind}; "
                    f"rename it (taken: {', '.join(sorted(KERNEL_KEYS[kind]))})"
                )


def _keys(name: str, info: FieldInfo) -> set[str]:
    """Every key that a run config could set this field with."""
    alias = info.validation_alias
    choices = getattr(alias, "choices", [alias])
    firsts = [choice.path[0] if hasattr(choice, "path") else choice for choice in choices]
    return {name} | {str(first) for first in firsts if first is not None}


def _describe(value: object) -> str:
    """Name a value in an error message without printing all of it."""
    if isinstance(value, ModuleType):
        return f"module {value.__name__}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def unknown(what: str, given: str, known: Sequence[str]) -> str:
    """Say that a name is not known, what is, and which of those is nearest."""
    if not known:
        return f"unknown {what} {given!r}; there is none"
    near = get_close_matches(given, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {what} {given!r}; expected one of {', '.join(known)}{hint}"


def refuse_while_loading() -> None:
    """Raise PluginError where a plugin asks for other components before all plugins are there."""
    if is_loading():
        raise PluginError(
            "a plugin asked for components while plugins are being loaded; do it in Component.build, which runs later"
        )
