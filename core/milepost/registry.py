"""The registry: which components there are, who provides them, and how one is built.

Everything that ships with milepost is found here exactly as anybody's plugin is. A name that two plugins claim is
nobody's until one of them is blocked, and nothing is ever put in the place of what is missing.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from milepost.components import KINDS, Kind
from milepost.discovery import (
    LOCAL,
    PluginRecord,
    Provided,
    State,
    load_plugins,
    refuse_while_loading,
    unknown,
)
from milepost.entry_points import normalise
from milepost.errors import MilepostError, PluginError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = ["PluginRecord", "Provided", "Registry", "State", "current", "resolve", "use"]

FALLBACK = "*"
"""Architecture of a recipe that serves whatever no other recipe does."""


class Registry:
    """The components that plugins provide, by kind and name.

    Make one with `Registry.load`; it never changes afterwards.
    """

    def __init__(
        self,
        plugins: Iterable[PluginRecord],
        *,
        warnings: Iterable[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        records = list(plugins)
        self._by_name: dict[tuple[Kind, str], list[Provided]] = {}
        self._by_architecture: dict[str, list[Provided]] = {}
        for item in (item for record in records for item in record.components):
            self._by_name.setdefault((item.kind, item.name), []).append(item)
            for architecture in getattr(item.component.traits, "architectures", ()):
                self._by_architecture.setdefault(architecture, []).append(item)
        self._plugins = [self._judge(record) for record in records]
        self.warnings = tuple(warnings)
        """What a user should know of the loading itself, for example a block entry that names nothing."""
        self.settings: Mapping[str, Any] = dict(settings or {})
        """Plain data with which `Registry.load(**settings)` makes the same registry in another process."""

    @classmethod
    def load(
        cls,
        *,
        block: Iterable[str] = (),
        modules: Iterable[str] = (),
        base_dir: Path | str | None = None,
        discover: Callable[[], Iterable[EntryPoint]] | None = None,
        import_limit: float | None = None,
    ) -> Registry:
        """Find, import and validate all plugins.

        `block` has plugins that are not even imported: NAME or DISTRIBUTION:NAME (`local:NAME` for a module).
        `modules` are hook modules in `base_dir` (default the working directory), each NAME.py or a package NAME.
        `discover` stands in for the entry points of the installed distributions. A plugin whose import takes longer
        than `import_limit` seconds is stopped and counts as broken (in the main thread; None waits).

        A plugin that fails is recorded in `plugins`; only KeyboardInterrupt comes through.
        """
        block, modules = tuple(block), tuple(modules)
        folder = Path.cwd() if base_dir is None else Path(base_dir).absolute()
        records, warnings = load_plugins(
            block=block, modules=modules, base_dir=folder, discover=discover, import_limit=import_limit
        )
        settings = {"block": list(block), "modules": list(modules), "base_dir": str(folder)}
        return cls(records, warnings=warnings, settings=settings)

    @property
    def plugins(self) -> list[PluginRecord]:
        """Every plugin that was found, whatever became of it."""
        return list(self._plugins)

    def names(self, kind: Kind) -> list[str]:
        """Names of the usable components of a kind, sorted."""
        return [item.name for item in self.provided(kind)]

    def provided(self, kind: Kind) -> list[Provided]:
        """The usable components of a kind, sorted by name; without those that two plugins claim."""
        _check_kind(kind)
        usable = [items[0] for key, items in self._by_name.items() if key[0] == kind and len(items) == 1]
        return sorted(usable, key=lambda item: item.name)

    def get(self, kind: Kind, name: str) -> Provided:
        """Return the component of this kind and name.

        Raises PluginError if there is none, if two plugins claim it, or if the plugin of this name is broken (with
        its traceback) or blocked.
        """
        _check_kind(kind)
        items = self._by_name.get((kind, name), [])
        if len(items) > 1:
            raise PluginError(_conflict(f"{kind} {name!r} is provided by", items))
        if items:
            return items[0]
        for record in self._plugins:
            if record.name == name and record.state == "broken":
                raise PluginError(
                    f"{kind} {name!r} cannot be had: plugin {name!r} from {record.origin} did not load. "
                    f"Repair or uninstall it.\n{(record.traceback or record.error).rstrip()}"
                )
            if record.name == name and record.state == "blocked":
                raise PluginError(
                    f"{kind} {name!r} cannot be had: plugin {name!r} from {record.origin} is blocked; "
                    "take it out of plugins.block and --block"
                )
        message = unknown(kind, name, self.names(kind))
        elsewhere = [other for other in KINDS if (other, name) in self._by_name]
        if elsewhere:
            message += f". {name!r} is the name of {' and '.join(_a(other) for other in elsewhere)}"
        raise PluginError("\n  ".join([message, *self.failures()]))

    def for_architecture(self, architecture: str, override: str | None = None) -> Provided:
        """Return the model recipe for a Hugging Face architecture, or the one named by `override`.

        The recipe for `*` serves what no other recipe does. Raises PluginError if there is no recipe, or if two
        plugins serve this architecture; naming one of the two by `override` is then a way out.
        """
        if override is not None:
            return self.get("model", override)
        for wanted in (architecture, FALLBACK):
            items = self._by_architecture.get(wanted, [])
            if len(items) > 1:
                names = sorted({item.name for item in items})
                choice = f" Or name one of them: model.recipe: {' | '.join(names)}." if len(names) > 1 else ""
                what = "every other architecture" if wanted == FALLBACK else f"architecture {wanted!r}"
                raise PluginError(_conflict(f"{what} is served by", items) + choice)
            if items:
                return self.get("model", items[0].name)
        message = unknown("architecture", architecture, sorted(self._by_architecture))
        raise PluginError("\n  ".join([message, *self.failures()]))

    def failures(self) -> list[str]:
        """One line for each plugin that did not load or is blocked, for messages about something that is missing."""
        lines = []
        for record in self._plugins:
            if record.state == "broken":
                reason = record.error.splitlines()[-1] if record.traceback else " ".join(record.error.split())
                lines.append(f"plugin {record.name!r} from {record.origin} did not load: {reason}")
            elif record.state == "blocked":
                lines.append(f"plugin {record.name!r} from {record.origin} is blocked")
        return lines

    def distributions(self) -> dict[str, str]:
        """Distribution to version, of all loaded plugins; a local module is `local:NAME` with its content hash.

        Checkpoints record this, and workers compare it with the driver's.
        """
        loaded = [record for record in self._plugins if record.state in ("ok", "conflicting")]
        return {
            record.label if record.distribution == LOCAL else normalise(record.distribution): record.version
            for record in loaded
        }

    def differences(self, recorded: Mapping[str, str]) -> list[str]:
        """Say how `distributions()` of an earlier run or another process differs from what is loaded here."""
        here = self.distributions()
        return [
            f"{name}: {recorded.get(name, 'absent')} there, {here.get(name, 'absent')} here"
            for name in sorted({*recorded, *here})
            if recorded.get(name) != here.get(name)
        ]

    def resolve(self, kind: Kind, name: str, options: Mapping[str, Any] | BaseModel | None = None) -> Any:
        """Build a component. `options` are checked by its own model; an instance of that model is taken as it is.

        Raises PluginError if there is no such component, the options do not fit it, or it cannot be built.
        """
        item = self.get(kind, name)
        checked = _check_options(item, options)
        try:
            return item.component.build(checked)
        except MilepostError:
            raise
        except ImportError as error:
            raise PluginError(
                f"{kind} {name!r} from {item.origin} needs something that cannot be imported: {error}. "
                "Install it; for what ships with milepost: pip install 'milepost[torch]'"
            ) from error
        except Exception as error:
            raise PluginError(
                f"{kind} {name!r} from {item.origin} could not be built.\n{traceback.format_exc().rstrip()}"
            ) from error

    def _judge(self, record: PluginRecord) -> PluginRecord:
        """Mark a plugin that claims a name or an architecture which another plugin claims too."""
        messages = []
        for item in record.components:
            rivals = self._by_name[item.kind, item.name]
            if len(rivals) > 1:
                messages.append(_conflict(f"{item.kind} {item.name!r} is provided by", rivals))
            for architecture in getattr(item.component.traits, "architectures", ()):
                rivals = self._by_architecture[architecture]
                if len(rivals) > 1:
                    messages.append(_conflict(f"architecture {architecture!r} is served by", rivals))
        return replace(record, state="conflicting", error="\n".join(messages)) if messages else record


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise PluginError(unknown("kind of component", kind, KINDS))


def _a(kind: str) -> str:
    return f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"


def _conflict(what: str, items: list[Provided]) -> str:
    owners = " and ".join(f"plugin {item.plugin!r} from {item.origin}" for item in items)
    blocks = " or ".join(f"--block {item.label}" for item in items)
    return f"{what} {owners}; neither is used. Block the other to choose: {blocks} (or plugins.block in a run config)."


def _check_options(item: Provided, options: Mapping[str, Any] | BaseModel | None) -> BaseModel:
    model = item.component.options
    if isinstance(options, model):
        return options
    if isinstance(options, BaseModel):
        raise PluginError(
            f"options of {item.kind} {item.name!r} are a {type(options).__name__}; expected a {model.__name__}"
        )
    try:
        return model.model_validate(dict(options or {}))
    except ValidationError as error:
        lines = [f"options of {item.kind} {item.name!r} from {item.origin} are wrong"]
        for problem in error.errors():
            path = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                lines.append(unknown("option", path, sorted(model.model_fields)))
            else:
                lines.append(f"{path or 'options'}: {problem['msg']} (given: {problem['input']!r})")
        raise PluginError("\n  ".join(lines)) from error


_lock = threading.RLock()
_current: Registry | None = None


def current() -> Registry:
    """Return the registry of this process, loading all installed plugins at the first call if `use` set none."""
    global _current
    refuse_while_loading()
    with _lock:
        if _current is None:
            _current = Registry.load()
        return _current


def use(registry: Registry | None) -> None:
    """Make `registry` the one of this process; None forgets it, and the next `current()` loads anew."""
    global _current
    with _lock:
        _current = registry


def resolve(kind: Kind, name: str, options: Mapping[str, Any] | BaseModel | None = None) -> Any:
    """Build a component of the process-wide registry: how one component reaches another.

    `options` are checked by the component's own model. Raises PluginError, see `Registry.resolve`.
    """
    return current().resolve(kind, name, options)
