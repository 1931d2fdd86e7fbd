"""Run configs as trees of values that know where they came from: reading YAML, `--set`, and composition.

YAML is read by the 1.2 rules where 1.1 surprises: `1e-6` is a number, `on`, `off`, `yes` and `no` are text, dates and
`1:30` are text, and `010` is ten.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from milepost.errors import Problem

Value: TypeAlias = "dict[str, Node] | list[Node] | str | int | float | bool | None"

SET = "--set"

MAX_DEPTH = 100
"""Levels of mappings and lists a run config may have."""
MAX_VALUES = 100_000
"""Values a run config may have, those repeated through YAML anchors included: they multiply without effort."""


@dataclass(frozen=True, slots=True)
class Node:
    """A value and where it came from. Mappings and lists hold nodes."""

    value: Value
    origin: str

    def plain(self) -> Any:
        """Return the value as plain Python objects, without origins."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def child(self, key: str) -> Node | None:
        """Return what stands under `key` (or list index), None if nothing does."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and key.isdecimal() and int(key) < len(self.value):
            return self.value[int(key)]
        return None

    def find(self, path: str) -> Node | None:
        """Return what stands at a dotted path, None if nothing does."""
        node: Node | None = self
        for key in path.split("."):
            node = node.child(key) if node is not None else None
        return node

    def origin_of(self, path: str) -> str:
        """Return the origin of what stands at a dotted path, or of the nearest thing that holds it."""
        node = self
        for key in path.split("."):
            below = node.child(key)
            if below is None:
                break
            node = below
        return node.origin


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalar rules of YAML 1.2."""


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F_]+|0o[0-7_]+", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
    ("merge", r"<<", "<"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first))


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node)).replace("_", "")
    base = {"0x": 16, "0o": 8}.get(text[:2], 10)
    return int(text, base)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)

_TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"
_PLAIN = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")

Report: TypeAlias = Callable[[Problem], None]


class _TooMuchError(yaml.MarkedYAMLError):
    """A document that is valid YAML, but deeper or larger than any run config."""


class _Reader:
    """Turns a composed YAML document into nodes, reporting what a run config may not contain.

    Raises _TooMuchError beyond MAX_DEPTH and MAX_VALUES.
    """

    def __init__(self, loader: _Loader, origin: Callable[[yaml.Node], str], report: Report) -> None:
        self.loader = loader
        self.origin = origin
        self.report = report
        self.open: list[yaml.Node] = []
        self.count = 0

    def read(self, node: yaml.Node, path: str = "") -> Node:
        origin = self.origin(node)
        if any(node is parent for parent in self.open):
            self.report(Problem(path, "refers to itself through a YAML anchor; write the value out", origin))
            return Node(None, origin)
        self.count += 1
        if len(self.open) == MAX_DEPTH:
            raise _TooMuchError(problem=_TOO_DEEP, problem_mark=node.start_mark)
        if self.count > MAX_VALUES:
            what = f"more than {MAX_VALUES} values, repeated ones included"
            raise _TooMuchError(problem=what, problem_mark=node.start_mark)
        self.open.append(node)
        try:
            return Node(self._value(node, path), origin)
        finally:
            self.open.pop()

    def _value(self, node: yaml.Node, path: str) -> Value:
        if isinstance(node, yaml.CollectionNode) and node.tag not in _PLAIN:
            self.report(Problem(path, f"cannot read this value: tag {node.tag} is not allowed", self.origin(node)))
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.read(item, join(path, str(index))) for index, item in enumerate(node.value)]
        try:
            value: Value = self.loader.construct_object(node, deep=True)
        except (yaml.YAMLError, ValueError) as error:
            what = getattr(error, "problem", None) or str(error)
            self.report(Problem(path, f"cannot read this value: {what}", self.origin(node)))
            return None
        return value

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Node]:
        merged: dict[str, Node] = {}
        given: dict[str, Node] = {}
        for key_node, value_node in node.value:
            origin = self.origin(key_node)
            if key_node.tag == "tag:yaml.org,2002:merge":
                # `<<: *anchor`: keys of the anchor stand below the mapping's own ones, the first of a list wins.
                sources = value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                for source in reversed(sources):
                    value = self.read(source, path).value
                    if isinstance(value, dict):
                        merged.update(value)
                    else:
                        self.report(Problem(join(path, "<<"), "expected a mapping to take keys from", origin))
                continue
            if key_node.tag != "tag:yaml.org,2002:str":
                shown = getattr(key_node, "value", "")
                shown = shown if isinstance(shown, str) else "a mapping or list"
                self.report(Problem(path, f"a key must be text, got {shown}; put it in quotes if it is meant", origin))
                continue
            key = key_node.value
            if key in given:
                message = f"given twice in one file, first at {given[key].origin}; remove one"
                self.report(Problem(join(path, key), message, origin))
                continue
            read = self.read(value_node, join(path, key))
            # A scalar stands on its key's line; for a block mapping or list the key's line is where a reader looks.
            given[key] = Node(read.value, origin)
        return {**merged, **given}


def join(path: str, key: str) -> str:
    """Append a key to a dotted path."""
    return f"{path}.{key}" if path else key


def read_file(path: Path, shown: str, report: Report) -> Node | None:
    """Read one run config; `shown` is how its name appears in origins. Returns None where nothing could be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        report(Problem("", f"run config {shown} does not exist; looked for {path.absolute()}"))
        return None
    except IsADirectoryError:
        report(Problem("", f"run config {shown} is a folder; expected a YAML file"))
        return None
    except UnicodeDecodeError as error:
        report(Problem("", f"run config {shown} is not UTF-8 text ({error.reason} at byte {error.start})"))
        return None
    except OSError as error:
        report(Problem("", f"run config {shown} cannot be read: {error.strerror or error}"))
        return None
    return _read_text(text, lambda node: f"{shown}:{node.start_mark.line + 1}", shown, report)


def _read_text(text: str, origin: Callable[[yaml.Node], str], shown: str, report: Report) -> Node | None:
    try:
        loader = _Loader(text)
        document = loader.get_single_node()
        if document is None:
            return Node({}, shown)
        if not isinstance(document, yaml.MappingNode):
            kind = "a list" if isinstance(document, yaml.SequenceNode) else "a single value"
            report(Problem("", f"expected sections such as `model:` and `data:`, got {kind}", origin(document)))
            return None
        node = _Reader(loader, origin, report).read(document)
    except yaml.YAMLError as error:
        report(_syntax_problem(error, shown))
        return None
    except RecursionError:
        report(Problem("", _TOO_DEEP, shown))
        return None
    assert isinstance(node.value, dict)
    # A section whose lines are all commented out reads as null: nothing was given.
    sections = {key: Node({}, child.origin) if child.value is None else child for key, child in node.value.items()}
    return Node(sections, shown)


def _syntax_problem(error: yaml.YAMLError, shown: str) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        if isinstance(error, _TooMuchError):
            return Problem("", f"not a run config: {error.problem}", f"{shown}:{mark.line + 1}")
        what = " ".join(part for part in (error.context, error.problem) if part)
        if error.context_mark is not None and error.context_mark.line != mark.line:
            what += f" (it begins on line {error.context_mark.line + 1})"
        return Problem("", f"not valid YAML: {what}, column {mark.column + 1}", f"{shown}:{mark.line + 1}")
    return Problem("", f"not valid YAML: {' '.join(str(error).split())}", shown)


def read_sets(sets: tuple[str, ...], report: Report) -> Node:
    """Read `KEY=VALUE` flags into one tree; a later flag wins over an earlier one."""
    tree = Node({}, SET)
    for flag in sets:
        key, equals, text = flag.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            report(Problem("", f"expected KEY=VALUE such as optimizer.lr=2e-6, got {flag!r}", SET))
            continue
        try:
            loader = _Loader(text)
            document = loader.get_single_node()
            value = Node(None, SET) if document is None else _Reader(loader, lambda _: SET, report).read(document, key)
        except RecursionError:
            report(Problem(key, _TOO_DEEP, SET))
            continue
        except yaml.YAMLError as error:
            what = getattr(error, "problem", None) or " ".join(str(error).split())
            report(Problem(key, f"the value {text!r} is not valid YAML: {what}; quote it if it is text", SET))
            continue
        tree = merge(tree, nest(key, value), report)
    return tree


def nest(path: str, value: Node) -> Node:
    """Return a tree with one value at a dotted path."""
    for key in reversed(path.split(".")):
        value = Node({key: value}, value.origin)
    return value


def merge(
    base: Node, over: Node, report: Report, *, replaced: Callable[[str, Node, Node], Node] | None = None, path: str = ""
) -> Node:
    """Compose two trees: mappings merge key by key, lists and scalars of `over` replace.

    A mapping of list indices (`--set eval.datasets.0.limit=8`) changes single elements of a list. `replaced(path,
    base, over)` may return a changed base before a mapping is merged.
    """
    if isinstance(base.value, list) and isinstance(over.value, dict) and over.value and _indices(over.value):
        items = list(base.value)
        for key, node in over.value.items():
            if int(key) >= len(items):
                message = f"there is no element {key}: the list has {len(items)} (counted from 0)"
                report(Problem(join(path, key), message, node.origin))
                continue
            items[int(key)] = merge(items[int(key)], node, report, replaced=replaced, path=join(path, key))
        return Node(items, base.origin)
    if not (isinstance(base.value, dict) and isinstance(over.value, dict)):
        return over
    if replaced is not None:
        base = replaced(path, base, over)
    assert isinstance(base.value, dict)
    result = dict(base.value)
    for key, node in over.value.items():
        below = join(path, key)
        result[key] = merge(result[key], node, report, replaced=replaced, path=below) if key in result else node
    # What is missing from a mapping is missed in the last file that wrote it; a flag sets single values.
    return Node(result, base.origin if over.origin.startswith("--") else over.origin)


def _indices(keys: Mapping[str, Node]) -> bool:
    return all(key.isdecimal() for key in keys)


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) of plain data; a list of plain values, or an empty mapping, is one leaf."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, join(path, str(key)))
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            yield from leaves(item, join(path, str(index)))
    else:
        yield path, value
