"""Loading run configs: files composed left to right, flags on top, every problem reported at once.

Mappings merge key by key; lists and scalars replace. A section that names a component drops the options of the other
component when a later file changes its `name`; the kernel's own keys stay. All relative paths in a run config, and in
`--set`, are taken from the folder of the last run config.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from milepost.config.choices import Choice, Chooser, component_sections, kernel_keys
from milepost.config.documents import Node, join, leaves, merge, nest, read_file, read_sets
from milepost.config.files import missing_files, resolve_path
from milepost.config.messages import Validator, show, unknown_key
from milepost.config.schema import PluginsSection, RunConfig
from milepost.errors import ConfigError, Problem
from milepost.registry import Registry


@dataclass(frozen=True, slots=True)
class Flag:
    """A value given by a flag of the command line other than `--set`."""

    path: str
    """Dotted path it sets."""
    value: Any
    origin: str
    """The flag, for example `--resume`."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A valid run config, before anything is derived from it."""

    config: RunConfig
    origins: Mapping[str, str]
    """Dotted path of every value to where it came from: `FILE:LINE`, `--set` or another flag, `default`."""
    base_dir: Path
    """Folder relative paths are taken from: the last run config's, absolute."""
    registry: Registry
    choices: Mapping[str, Choice]
    """The components, by section: `algorithm`, `advantage`, `reward`, `transport`, `eval.datasets.0.reward`."""
    files: tuple[Path, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """Things composition did that a user may not expect."""
    derived: frozenset[str] = frozenset()
    """Component names and options that follow from another choice."""

    @property
    def name(self) -> str:
        """Name of the run: the last run config's file name without its ending."""
        return self.files[-1].stem

    def origin(self, path: str) -> str:
        """Return where the value at a dotted path came from, or what holds it; empty where nothing gave it."""
        while path:
            if path in self.origins:
                found = self.origins[path]
                return "" if found == "default" else found
            path = path.rpartition(".")[0]
        return ""


def load_config(
    paths: str | Path | Sequence[str | Path],
    sets: Iterable[str] = (),
    *,
    block: Iterable[str] = (),
    flags: Iterable[Flag] = (),
    registry: Registry | None = None,
) -> Loaded:
    """Read, compose and validate run configs.

    `sets` are `KEY=VALUE` texts as `--set` takes them, `block` plugins that are not to be imported, beside
    `plugins.block`. `registry` stands in for the one that would be loaded (its blocking and modules are then as they
    are). Raises ConfigError with every problem that was found.
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    if not files:
        raise ConfigError([Problem("", "no run config given; expected at least one YAML file")])
    problems: list[Problem] = []
    composer = _Composer(problems)
    tree = composer.compose(files, tuple(sets), [*flags, *_block_flags(block)])
    if tree is None:
        raise ConfigError(problems)
    base_dir = resolve_path(str(files[-1]), Path.cwd()).parent
    validator = Validator(tree, _elsewhere())
    sections = _validate_sections(tree, validator)
    chosen: dict[str, Choice] = {}
    derived: set[str] = set()
    if registry is None and isinstance(plugins := sections.get("plugins"), PluginsSection):
        registry = Registry.load(block=plugins.block, modules=plugins.modules, base_dir=base_dir)
    if registry is not None:
        chooser = Chooser(registry, validator)
        chooser.choose(sections)
        chosen, derived = chooser.chosen, chooser.derived
    # What could not be read stands in the tree as null: what validation says about that is no news.
    unread = {problem.path for problem in problems}
    problems += [problem for problem in validator.problems if problem.path not in unread]
    if problems or registry is None:
        raise ConfigError([*problems, *missing_files(sections, base_dir, tree.origin_of)])
    config = RunConfig.model_validate(sections)
    origins = {path: _origin(tree, path) for path, _ in leaves(config.model_dump())}
    return Loaded(config, origins, base_dir, registry, chosen, tuple(files), tuple(composer.notes), frozenset(derived))


def _block_flags(block: Iterable[str]) -> list[Flag]:
    names = list(block)
    return [Flag("plugins.block", names, "--block")] if names else []


class _Composer:
    """Composes files and flags into one tree."""

    def __init__(self, problems: list[Problem]) -> None:
        self.report = problems.append
        self.notes: list[str] = []
        self.sections = component_sections()

    def compose(self, files: Sequence[Path], sets: tuple[str, ...], flags: Sequence[Flag]) -> Node | None:
        trees = [read_file(path.expanduser(), str(path), self.report) for path in files]
        over = read_sets(sets, self.report)
        read = [tree for tree in trees if tree is not None]
        if len(read) < len(trees):
            return None
        result = read[0]
        for tree in [*read[1:], over]:
            result = merge(result, tree, self.report, replaced=self._forget_options)
        # A section that is missing is missing from all files.
        result = Node(result.value, ", ".join(map(str, files)))
        for flag in flags:
            result = self._apply(result, flag)
        return result

    def _apply(self, tree: Node, flag: Flag) -> Node:
        value = flag.value
        if flag.path == "plugins.block":
            # A flag blocks beside what the files block.
            given = tree.find(flag.path)
            before = [] if given is None or given.value is None else given.plain()
            value = [*(before if isinstance(before, list) else [before]), *value]
        leaf = [Node(item, flag.origin) for item in value] if isinstance(value, list) else value
        return merge(tree, nest(flag.path, Node(leaf, flag.origin)), self.report)

    def _forget_options(self, path: str, base: Node, over: Node) -> Node:
        """Drop a component's options where the overlay names another component."""
        section = self.sections.get(path)
        renamed = over.child("name")
        if section is None or renamed is None or not isinstance(base.value, dict):
            return base
        before, after = base.child("name"), renamed.value
        name = before.value if before is not None else section.model_fields["name"].get_default()
        # A section without a name, whose default depends on others, may well mean the component named now.
        if not isinstance(name, str) or name == after:
            return base
        kernel = kernel_keys(section)
        for key, node in base.value.items():
            if key not in kernel:
                dropped = f"{join(path, key)} ({node.origin}) belonged to {name!r} and was dropped:"
                self.notes.append(f"{dropped} {renamed.origin} chose {show(after)}")
        return Node({key: node for key, node in base.value.items() if key in kernel}, base.origin)


def _validate_sections(tree: Node, validator: Validator) -> dict[str, BaseModel]:
    """Validate every section by itself, so that one that is wrong hides nothing in the others."""
    assert isinstance(tree.value, dict)
    fields = RunConfig.model_fields
    for key in tree.value:
        if key not in fields:
            elsewhere = validator.elsewhere.get(key, ())
            validator.report(key, unknown_key(key, fields, elsewhere=elsewhere, what="section"))
    sections: dict[str, BaseModel] = {}
    for key, info in fields.items():
        model = info.annotation
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)
        node = tree.child(key)
        data = {} if node is None or node.value is None else node.plain()
        if not isinstance(data, dict):
            names = ", ".join(list(model.model_fields)[:3])
            validator.report(key, f"expected a mapping with keys such as {names}, got {show(data)}")
            continue
        section = validator.validate(model, data, key)
        if section is not None:
            sections[key] = section
    return sections


def _elsewhere() -> dict[str, list[str]]:
    """Return for every key of the run config the dotted paths where it exists, to help a key in the wrong section."""
    places: dict[str, list[str]] = {}
    for section, info in RunConfig.model_fields.items():
        model = info.annotation
        assert isinstance(model, type)
        for key in getattr(model, "model_fields", {}):
            places.setdefault(key, []).append(f"{section}.{key}")
    return places


def _origin(tree: Node, path: str) -> str:
    """Return the origin of a value, `default` where nothing gave it."""
    node = tree.find(path)
    return "default" if node is None else node.origin
