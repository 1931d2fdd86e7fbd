"""Validation in plain words: pydantic's findings as problems that say what was given, expected, and meant."""

from __future__ import annotations

import difflib
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from milepost.config.documents import Node, join
from milepost.errors import Problem

_EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of reasonable size",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "string_sub_type": "text",
    "tuple_type": "a list",
    "list_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dataclass_type": "a mapping",
    "none_required": "null",
    "path_type": "a path",
}
_BOUNDS = {
    "greater_than": ("greater than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
    "multiple_of": ("a multiple of", "multiple_of"),
}
_LENGTHS = {
    "too_short": ("at least", "min_length", "element"),
    "too_long": ("at most", "max_length", "element"),
    "string_too_short": ("text of at least", "min_length", "character"),
    "string_too_long": ("text of at most", "max_length", "character"),
}

_MANY = 3
"""A key that exists in more places than this says nothing about where it was meant to stand."""


def show(value: Any) -> str:
    """Return a given value as a short text for a message."""
    if isinstance(value, Mapping):
        return f"a mapping with {', '.join(map(str, value))}" if value else "an empty mapping"
    if isinstance(value, list | tuple) and len(value) > 4:
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(list(value)) if isinstance(value, tuple) else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the valid name closest to a wrong one, None where nothing is close."""
    candidates = list(names)
    lowered = {candidate.lower().replace("-", "_"): candidate for candidate in candidates}
    close = difflib.get_close_matches(name.lower().replace("-", "_"), lowered, n=1, cutoff=0.6)
    return lowered[close[0]] if close else None


def models_in(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that a mapping given for this annotation may be, inside lists and unions as well."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in typing.get_args(annotation) for model in models_in(argument)]


def fields_at(model: type[BaseModel], path: Sequence[str | int]) -> dict[str, FieldInfo]:
    """Return the fields valid inside the mapping that stands at `path` below `model`."""
    models = [model]
    for key in path:
        if isinstance(key, str):
            annotations = [m.model_fields[key].annotation for m in models if key in m.model_fields]
            models = [below for annotation in annotations for below in models_in(annotation)]
    return {name: field for m in models for name, field in m.model_fields.items()}


def unknown_key(key: str, known: Iterable[str], *, elsewhere: Sequence[str] = (), what: str = "key") -> str:
    """Return the message for a key nobody knows; `elsewhere` are dotted paths where this very key does exist."""
    names = sorted(known)
    if 0 < len(elsewhere) <= _MANY:
        return f"unknown {what} here; did you mean {' or '.join(elsewhere)}?"
    if guess := nearest(key, names):
        return f"unknown {what}; did you mean {guess!r}?"
    return f"unknown {what}; known here: {', '.join(names) or 'none'}"


class Validator:
    """Validates sections of a run config against models and collects what is wrong."""

    def __init__(self, tree: Node, elsewhere: Mapping[str, Sequence[str]]) -> None:
        self.tree = tree
        self.elsewhere = elsewhere
        """Key to the dotted paths of the run config where it exists."""
        self.problems: list[Problem] = []

    def report(self, path: str, message: str) -> None:
        """Record a problem with the origin of what stands at `path`."""
        self.problems.append(Problem(path, message, self.tree.origin_of(path)))

    def validate(
        self, model: type[BaseModel], data: Any, path: str, known: Iterable[str] = (), inherited: str = ""
    ) -> BaseModel | None:
        """Return the validated model, or None with the problems recorded.

        `known` are further keys that are valid beside the model's own; `inherited` ends messages about keys, and says
        whose options they are.
        """
        truths = set(_truths(model, data, path))
        findings: list[ErrorDetails] = []
        built = None
        try:
            built = model.model_validate(data)
        except ValidationError as error:
            findings = error.errors(include_url=False)
        groups: dict[tuple[str | int, ...], list[tuple[bool, ErrorDetails]]] = {}
        for finding in findings:
            place, branched = _place(finding, data)
            groups.setdefault(place, []).append((branched, finding))
        for place, group in _without_refused_branches(groups, data).items():
            below = path
            for key in place:
                below = join(below, str(key))
            if below in truths:
                if group[0][1]["type"] not in _EXPECTED:
                    continue  # `must be greater than 1, got true`: that it is no number comes first
                truths.remove(below)
            unknown = [finding for _, finding in group if finding["type"] == "extra_forbidden"]
            if unknown:
                names = {*fields_at(model, place[:-1]), *(known if len(place) == 1 else ())}
                key = str(place[-1])
                message = unknown_key(key, names, elsewhere=self.elsewhere.get(key, ()))
                self.report(below, message + inherited)
            elif group[0][1]["type"] == "missing" and isinstance(group[0][1]["loc"][-1], str):
                field = fields_at(model, place[:-1]).get(str(place[-1]))
                about = f": {_first_sentence(field.description)}" if field and field.description else ""
                self.report(below, f"required, but not given{about}")
            else:
                self.report(below, _sentence([finding for _, finding in group]))
        for wrong in sorted(truths):
            self.report(wrong, "expected a number, got true or false")
        return None if findings or truths else built


def _truths(model: type[BaseModel], data: Any, path: str) -> list[str]:
    """Return where `true` or `false` was given for a number, which pydantic would take as 1 or 0."""
    found: list[str] = []
    for key, field in model.model_fields.items():
        if not isinstance(data, Mapping) or key not in data:
            continue
        item, place = data[key], join(path, key)
        accepted = _scalars(field.annotation)
        values = [(place, item)]
        if isinstance(item, list):
            values = [(join(place, str(index)), element) for index, element in enumerate(item)]
        for below, value in values:
            if isinstance(value, bool) and accepted & {int, float} and bool not in accepted:
                found.append(below)
            for nested in models_in(field.annotation):
                found += _truths(nested, value, below)
    return found


def _scalars(annotation: Any) -> set[Any]:
    """Return the plain types an annotation accepts, inside lists and unions as well."""
    if annotation is Any:
        return {bool}
    arguments = [argument for argument in typing.get_args(annotation) if not isinstance(argument, FieldInfo)]
    if typing.get_origin(annotation) is typing.Literal:
        return {type(argument) for argument in arguments}
    return set().union(*map(_scalars, arguments)) if arguments else {annotation}


def _place(finding: ErrorDetails, data: Any) -> tuple[tuple[str | int, ...], bool]:
    """Return where in the given data a finding is, and whether it belongs to one branch of a union.

    pydantic's locations name the branches of unions between the keys; what is not in the data is such a name.
    """
    place: list[str | int] = []
    branched = False
    loc = finding["loc"]
    for index, key in enumerate(loc):
        last = index == len(loc) - 1
        if isinstance(data, Mapping) and (key in data or (last and finding["type"] == "missing")):
            place.append(key)
            data = data.get(key)
        elif isinstance(data, list | tuple) and isinstance(key, int) and key < len(data):
            place.append(key)
            data = data[key]
        elif isinstance(data, list | tuple) and last and finding["type"] == "missing":
            # One position too few in a fixed-length list: the list itself is what is wrong.
            return tuple(place), branched
        else:
            branched = True
    return tuple(place), branched


def _without_refused_branches(
    groups: dict[tuple[str | int, ...], list[tuple[bool, ErrorDetails]]], data: Any
) -> dict[tuple[str | int, ...], list[tuple[bool, ErrorDetails]]]:
    """Drop, where a mapping was given for a union, what the branches that are no mapping say about it."""
    kept = {}
    for place, group in groups.items():
        deeper = any(len(other) > len(place) and other[: len(place)] == place for other in groups)
        if deeper and all(branched for branched, _ in group):
            continue
        kept[place] = group
    return kept


def _sentence(findings: Sequence[ErrorDetails]) -> str:
    """Return one message for the findings at one place: several where a union offers several things."""
    given = findings[0]["input"]
    types_given = {finding["type"] for finding in findings}
    if len(findings) == 1:
        finding = findings[0]
        kind, context = finding["type"], finding.get("ctx", {})
        if kind == "literal_error":
            choices = re.findall(r"'([^']*)'", str(context.get("expected", "")))
            guess = nearest(given, choices) if isinstance(given, str) else None
            hint = f"; did you mean {guess!r}?" if guess else ""
            return f"expected {context.get('expected')}, got {show(given)}{hint}"
        if kind in _BOUNDS:
            words, bound = _BOUNDS[kind]
            limit = context.get(bound)
            shown = f"{limit:g}" if isinstance(limit, float) else limit
            return f"must be {words} {shown}, got {show(given)}"
        if kind in _LENGTHS:
            words, bound, unit = _LENGTHS[kind]
            count = context.get(bound)
            return f"expected {words} {count} {unit}{'' if count == 1 else 's'}, got {show(given)}"
        if kind == "string_pattern_mismatch":
            return f"expected text that matches {context.get('pattern')}, got {show(given)}"
        if kind == "missing":
            # Lists of fixed length report the first position that is not there.
            return f"expected more elements than {finding['loc'][-1]}"
    expected = list(dict.fromkeys(filter(None, map(_expectation, findings))))
    if expected and types_given <= {*_EXPECTED, "literal_error"}:
        guess = None
        if isinstance(given, str):
            contexts = [str(finding.get("ctx", {}).get("expected", "")) for finding in findings]
            guess = nearest(given, [name for text in contexts for name in re.findall(r"'([^']*)'", text)])
        hint = f"; did you mean {guess!r}?" if guess else ""
        return f"expected {', or '.join(expected)}, got {show(given)}{hint}"
    texts = dict.fromkeys(_lower(re.sub(r"^(Value error|Assertion failed), ", "", f["msg"])) for f in findings)
    return f"{'; '.join(texts)} (got {show(given)})"


def _expectation(finding: ErrorDetails) -> str | None:
    if finding["type"] == "literal_error":
        return str(finding.get("ctx", {}).get("expected"))
    return _EXPECTED.get(finding["type"])


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def _first_sentence(text: str) -> str:
    flat = " ".join(text.split())
    return flat.split(". ")[0].split("; ")[0].rstrip(".")
