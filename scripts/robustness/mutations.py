"""Every way a run config can be wrong that its schema tells of, and what a YAML file itself can have wrong."""

from __future__ import annotations

import copy
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import yaml
from milepost.components import Kind
from milepost.config.schema import ComponentSection, RunConfig
from milepost.registry import Registry
from pydantic import BaseModel
from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Mutation:
    """One bad run config."""

    kind: str
    """What is wrong, in two words."""
    what: str
    """What was done."""
    path: str
    """Dotted path that the message must begin with; empty where the file as a whole is wrong."""
    content: bytes | None
    """The file; None for a folder in its place."""
    offers: str | None = None
    """A name the message must offer."""


# What can be wrong with values


def mutate(document: dict[str, Any], known: Registry) -> Iterator[Mutation]:
    """Yield every mutation of one run config's document."""
    places = dict(_fields(document, known))
    for path, field in places.items():
        key = path.rpartition(".")[2]
        present = _find(document, path) is not None
        for misspelt in _misspellings(key):
            beside = _siblings(places, path)
            if misspelt not in beside and _nearest_is(misspelt, key, beside):
                wrong = _renamed(document, path, misspelt)
                yield _mutation("misspelt key", wrong[1], f"{key} -> {misspelt}", wrong[0], offers=key)
        for value, kind in _wrong_values(field):
            yield _mutation(kind, path, _short(value), _with(document, path, value))
        for value, offer in _wrong_names(path, field, document, known):
            yield _mutation("wrong name", path, _short(value), _with(document, path, value), offers=offer)
        if field.is_required() and present and path.count(".") == 1:
            yield _mutation("missing value", path, "left out", _without(document, path))
    for section in sorted({path.rpartition(".")[0] for path in places}):
        parent = f"{section}.frobnicate" if section else "frobnicate"
        if section == "" or isinstance(_find(document, section), dict):
            yield _mutation("unknown key", parent, "added", _with(document, parent, 1))
    for path, value in _wrong_files(document):
        yield _mutation("missing file", path, _short(value), _with(document, path, value))


def _mutation(kind: str, path: str, what: str, document: Any, offers: str | None = None) -> Mutation:
    text = yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    return Mutation(kind, what, path, text.encode(), offers)


def _fields(document: dict[str, Any], known: Registry) -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted path, field) of all sections, keys, keys inside them that the document has, and plugin options."""
    for section, info in RunConfig.model_fields.items():
        yield section, info
        model = info.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        yield from _model_fields(section, model, document)
        if issubclass(model, ComponentSection) and isinstance(name := _find(document, f"{section}.name"), str):
            options = known.get(cast(Kind, model.kind), name).component.options
            yield from ((f"{section}.{key}", field) for key, field in options.model_fields.items())


def _model_fields(path: str, model: type[BaseModel], document: dict[str, Any]) -> Iterator[tuple[str, FieldInfo]]:
    for key, field in model.model_fields.items():
        below = f"{path}.{key}"
        yield below, field
        given = _find(document, below)
        for nested in _models(field.annotation):
            if isinstance(given, dict):
                yield from _model_fields(below, nested, document)
            elif isinstance(given, list):
                for index, item in enumerate(given):
                    if isinstance(item, dict):
                        yield from _model_fields(f"{below}.{index}", nested, document)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in _models(argument)]


def _misspellings(key: str) -> Iterator[str]:
    """Two letters swapped, one left out, one doubled: where the word is long enough to be recognised."""
    if len(key) < 4:
        return
    middle = len(key) // 2
    yield key[: middle - 1] + key[middle] + key[middle - 1] + key[middle + 1 :]
    yield key[:middle] + key[middle + 1 :]
    yield key[:middle] + key[middle] + key[middle:]


def _nearest_is(word: str, wanted: str, names: set[str]) -> bool:
    """Whether no other name is as near by edit distance, so that offering another would be no fault."""
    return all(_distance(word, name) > _distance(word, wanted) for name in names if name != wanted)


def _distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def _siblings(places: dict[str, FieldInfo], path: str) -> set[str]:
    parent, _, _ = path.rpartition(".")
    return {other.rpartition(".")[2] for other in places if other.rpartition(".")[0] == parent}


def _accepted(annotation: Any) -> set[Any]:
    """Return the plain types an annotation accepts: int, float, bool, str, list, dict, None, Any, or literal texts."""
    if annotation is Any:
        return {Any}
    if annotation is None or annotation is type(None):
        return {None}
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _accepted(typing.get_args(annotation)[0])
    if origin is typing.Literal:
        return {"literal"}
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_accepted(argument) for argument in typing.get_args(annotation)))
    if origin in (tuple, list, frozenset, set):
        return {list}
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return {dict}
    return {annotation}


def _wrong_values(field: FieldInfo) -> Iterator[tuple[Any, str]]:
    """Yield (value, kind) of values that a field cannot have."""
    accepted = _accepted(field.annotation)
    if Any in accepted:
        return
    # `name: null` of a component is the same as leaving it out, and a section without lines reads as null.
    if None not in accepted and dict not in accepted:
        yield None, "null"
    if list not in accepted:
        yield [1, 2], "wrong type"
    if dict not in accepted:
        yield {"a": 1}, "wrong type"
    if str not in accepted:
        yield "überraschung", "wrong type"
        yield "", "wrong type"
    if accepted.isdisjoint({int, float}):
        yield 37, "wrong type"
    if bool not in accepted:
        yield True, "wrong type"
    if int in accepted and float not in accepted:
        yield 1.5, "wrong type"
        yield float("inf"), "not finite"
    if float in accepted:
        yield float("nan"), "not finite"
        yield float("-inf"), "not finite"
        yield 10**400, "huge number"
    for bound in _bounds(field):
        for name, wrong in (("gt", -1e-9), ("ge", -1e-9), ("lt", 1e-9), ("le", 1e-9)):
            limit = getattr(bound, name, None)
            if limit is None:
                continue
            if int in accepted and float not in accepted:
                step = {"gt": 0, "ge": -1, "lt": 0, "le": 1}[name]
                yield limit + step, "out of range"
                yield limit + (-(10**30) if name in ("gt", "ge") else 10**30), "out of range"
            else:
                yield (limit if name in ("gt", "lt") else limit + wrong), "out of range"
                yield limit + (-1e30 if name in ("gt", "ge") else 1e30), "out of range"


def _bounds(field: FieldInfo) -> Iterator[Any]:
    """Yield constraint objects, those inside a union's Annotated included, but not those of a list's elements."""
    yield from field.metadata
    pending = [field.annotation]
    while pending:
        annotation = pending.pop()
        origin = typing.get_origin(annotation)
        if origin is typing.Annotated:
            for extra in getattr(annotation, "__metadata__", ()):
                yield from extra.metadata if isinstance(extra, FieldInfo) else [extra]
        elif origin in (typing.Union, types.UnionType):
            pending += typing.get_args(annotation)


def _wrong_names(path: str, field: FieldInfo, document: dict[str, Any], known: Registry) -> Iterator[tuple[str, str]]:
    """Yield (misspelt, right) of values of which there are only some: literals, and components that are named."""
    names = [name for name in _literals(field.annotation) if isinstance(name, str)]
    section, _, key = path.rpartition(".")
    given = _find(document, path)
    if key == "name" and section in ("algorithm", "reward") and isinstance(given, str):
        names = known.names(cast(Kind, section))
    for name in names:
        for misspelt in _misspellings(name):
            if misspelt not in names and _nearest_is(misspelt, name, set(names)):
                yield misspelt, name


def _literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [literal for argument in typing.get_args(annotation) for literal in _literals(argument)]


def _wrong_files(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for path in ("model.path", "data.path", "reference.path", "critic.init_from", "checkpoint.init_from"):
        yield path, "../nowhere/at-all"
        yield path, "../quickstart/model/Ünïcode 漢字 \U0001f40d"
        yield path, "x" * 5000
    yield "data.path", "../quickstart/model"
    yield "data.path", "../quickstart/train.jsonl@[3:x]"
    yield "data.path", "/dev/null/train.jsonl"
    yield "model.path", "../quickstart/train.jsonl"
    yield "model.path", "."
    for index, _ in enumerate(document.get("eval", {}).get("datasets", [])):
        yield f"eval.datasets.{index}.path", "../quickstart/nowhere.jsonl"


# What can be wrong with the file itself


def broken_files(text: str) -> Iterator[Mutation]:
    """Yield what can be wrong with a YAML file; `text` is a good one."""
    deep = 3000
    laughs = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
    )
    cases: dict[str, tuple[str, str | bytes | None]] = {
        "a folder": ("", None),
        "a list": ("", "- model\n- data\n"),
        "a single value": ("", "just some words\n"),
        "a single number": ("", "42\n"),
        "an open bracket": ("", text + "track: [1, 2\n"),
        "an open quote": ("", text + 'track: "no end\n'),
        "a tab for indentation": ("", text + "track:\n\ttensorboard: true\n"),
        "wrong indentation": ("", text + "track:\n   tensorboard: true\n  samples_per_rollout: 3\n"),
        "a missing colon": ("", text + "track\n"),
        "a merge conflict": ("", text + "<<<<<<< HEAD\ntrack: {}\n=======\n"),
        "an unknown alias": ("", text + "track: *nothing\n"),
        "two documents": ("", text + "---\ntrack: {}\n"),
        "a control character": ("", text + "track: \x07\n"),
        "a null byte": ("", text + "track: \x00\n"),
        "latin-1": ("", (text + "# gr").encode() + b"\xfc\xdfe\n"),
        "UTF-16": ("", text.encode("utf-16")),
        "bytes of an image": ("", bytes(range(256)) * 4),
        "deep brackets": ("", "model: " + "[" * deep + "]" * deep + "\n"),
        "deep mappings": ("", "model: " + "{a: " * deep + "1" + "}" * deep + "\n"),
        "a section twice": ("track", text + "track: {}\ntrack: {}\n"),
        "a key twice": ("track.tensorboard", text + "track:\n  tensorboard: true\n  tensorboard: false\n"),
        "a number as a key": ("track", text + "track: {1: 2}\n"),
        "null as a key": ("track", text + "track: {~: 2}\n"),
        "a list as a key": ("track", text + "track: {[1, 2]: 2}\n"),
        "a Python object": ("track.tensorboard", text + "track: {tensorboard: !!python/name:os.system ''}\n"),
        "a Python call": ("track", text + "track: !!python/object/apply:os.system ['true']\n"),
        "binary": ("track.tensorboard", text + "track: {tensorboard: !!binary '%%%'}\n"),
        "a tag of its own": ("track.tensorboard", text + "track: {tensorboard: !mine 3}\n"),
        "an anchor that holds itself": ("track.wandb", text + "track: &a {wandb: *a}\n"),
        "a billion laughs": ("", text + laughs),
        "a merge of a text": ("track.<<", text + "track: {<<: x}\n"),
        "a section that is a list": ("track", text + "track: [1]\n"),
        "a section that is a text": ("track", text + "track: all of it\n"),
        "a number with letters": ("track.samples_per_rollout", text + "track: {samples_per_rollout: 0x1g}\n"),
        "a dotted key": ("track.wandb.mode", text + "track.wandb.mode: offline\n"),
        "a look-alike letter": ("trаck", text + "trаck: {}\n"),
        "an empty key": ("", text + "'': 3\n"),
    }
    for what, (path, content) in cases.items():
        data = content.encode() if isinstance(content, str) else content
        yield Mutation("YAML", what, path, data)


# Documents


def _find(document: Any, path: str) -> Any:
    for key in path.split("."):
        if isinstance(document, dict):
            document = document.get(key)
        elif isinstance(document, list) and key.isdecimal() and int(key) < len(document):
            document = document[int(key)]
        else:
            return None
    return document


def _with(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with another value at a path."""
    result = copy.deepcopy(document)
    *parents, last = path.split(".")
    at: Any = result
    for key in parents:
        at = at[int(key)] if isinstance(at, list) else at.setdefault(key, {})
    if isinstance(at, list):
        at[int(last)] = value
    else:
        at[last] = value
    return result


def _without(document: dict[str, Any], path: str) -> dict[str, Any]:
    result = copy.deepcopy(document)
    parent, _, key = path.rpartition(".")
    _find(result, parent).pop(key)
    return result


def _renamed(document: dict[str, Any], path: str, name: str) -> tuple[dict[str, Any], str]:
    """Return a copy with a key renamed (added if it is not there), and its path now."""
    parent, _, key = path.rpartition(".")
    now = f"{parent}.{name}" if parent else name
    value = _find(document, path)
    # A required key that is renamed is also missed, which is a second problem: so it stays, and the other is added.
    required = parent == "" or (key in ("path", "name"))
    result = document if value is None or required else _without(document, path)
    return _with(result, now, copy.deepcopy(value) if value is not None else 1), now


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
