r"""Whether an answer is the one on the label.

Cheapest first: the same text, the same number, and only then structure (tuples, sets, intervals, matrices, relations)
and formulas. A number on the label wants a number: `47+35` is not an answer to "what is 47+35", and neither is a
fraction that is not in lowest terms.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from milepost.samples import Sample

from milepost_deepscaler.answers import LENGTH_LIMIT, answer_of, key, normalise
from milepost_deepscaler.expressions import NotAFormulaError, are_equal, parse

DEPTH_LIMIT = 6
"""Collections inside collections."""
PARTS_LIMIT = 40
"""Elements of an unordered collection; longer ones are compared in order."""
EXPONENT_LIMIT = 500


class Deepscaler:
    """Scores 1 for a right answer in the last box after the thought, else 0."""

    def __init__(self, *, require_think: bool = True) -> None:
        self._require_think = require_think

    def score(self, sample: Sample) -> float:
        """Return 1.0 or 0.0. Raises ValueError if the sample has no label."""
        answer = answer_of(sample.text, require_think=self._require_think)
        labels = acceptable(sample.task.label)
        return float(answer is not None and any(is_correct(answer, label) for label in labels))


def acceptable(label: Any) -> list[str]:
    r"""Return the answers a label accepts: itself (text or number), or its elements if it is a list.

    Raises ValueError if there is none, or it is of another type.
    """
    labels = label if isinstance(label, list | tuple) else [label]
    if not labels or not all(isinstance(one, str | int | float) and str(one).strip() for one in labels):
        raise ValueError(f"deepscaler needs a label: a text, a number, or a list of acceptable ones; given {label!r}")
    return [str(one) for one in labels]


def is_correct(answer: str, label: str) -> bool:
    r"""Return whether `answer`, the content of a box, equals `label`, which may be in a `\boxed{}` itself."""
    if answer.strip() == label.strip():
        return True
    return _same(normalise(answer), normalise(label), DEPTH_LIMIT)


_INTEGER = r"\d+"
_NUMBER = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(?:[eE]([+-]?\d{1,4}))?")
_TEN = re.compile(r"(\d+(?:\.\d+)?|\.\d+) ?(?:\\times|\\cdot|\*) ?10 ?\^ ?\{? ?(-?\d{1,3}) ?\}?")
_FRACTION = re.compile(
    rf"(?:({_INTEGER}) ?)?\\frac\{{ ?(-?{_INTEGER}) ?\}}\{{ ?(-?{_INTEGER}) ?\}}"
    rf"|(?:({_INTEGER}) )?\(? ?(-?{_INTEGER}) ?/ ?(-?{_INTEGER}) ?\)?"
)
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,3}(?: \d{3})+")


@dataclass(frozen=True, slots=True)
class Literal:
    """A number written down, not computed."""

    value: Fraction
    reduced: bool = True
    """False for a fraction that is not in lowest terms."""


def literal(text: str) -> Literal | None:
    """Read a normalised text as a number: whole, decimal, scientific, fraction or mixed; None if it is none of them."""
    if len(text) > LENGTH_LIMIT:
        return None
    body = text.replace("{}", "").strip()
    sign = 1
    if body[:1] in ("+", "-"):
        sign = -1 if body[0] == "-" else 1
        body = body[1:].strip()
    if _THOUSANDS.fullmatch(body):
        body = body.replace(",", "").replace(" ", "")
    if match := _NUMBER.fullmatch(body) or _TEN.fullmatch(body):
        exponent = int(match[2] or 0)
        if abs(exponent) > EXPONENT_LIMIT:
            return None
        return Literal(sign * Fraction(match[1]) * Fraction(10) ** exponent)
    if match := _FRACTION.fullmatch(body):
        whole, numerator, denominator = (int(match[i] or match[i + 3] or 0) for i in (1, 2, 3))
        if denominator == 0 or (whole and min(numerator, denominator) < 0):
            return None
        reduced = math.gcd(numerator, denominator) == 1 and abs(denominator) != 1
        return Literal(sign * (whole + Fraction(numerator, denominator)), reduced)
    return None


def _same(answer: str, label: str, depth: int) -> bool:
    if key(answer) == key(label):
        return True
    if max(len(answer), len(label)) > LENGTH_LIMIT or depth == 0 or not answer or not label:
        return False
    wanted = literal(_without_brackets(label))
    if wanted is not None:
        given = literal(_without_brackets(answer))
        return given is not None and given.value == wanted.value and (given.reduced or not wanted.reduced)
    for split in (_matrix, _collection):
        ours, theirs = split(answer), split(label)
        if ours is not None or theirs is not None:
            return ours is not None and theirs is not None and _same_parts(ours, theirs, depth)
    ours, theirs = _relation(answer), _relation(label)
    if ours is not None and theirs is not None:
        return _same_parts(ours, theirs, depth) or _same_parts(ours, theirs.turned(), depth)
    if ours is not None or theirs is not None:
        return False
    try:
        return are_equal(parse(answer), parse(label))
    except NotAFormulaError:
        return False


@dataclass(frozen=True, slots=True)
class Parts:
    """An answer made of several: how it is held together, and its elements."""

    kind: str
    elements: tuple[str, ...]
    ordered: bool = True

    def turned(self) -> Parts:
        """Return the same relation read from right to left."""
        turn = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
        kinds = reversed(self.kind.split())
        return Parts(" ".join(turn.get(kind, kind) for kind in kinds), tuple(reversed(self.elements)))


def _same_parts(ours: Parts, theirs: Parts, depth: int) -> bool:
    if ours.kind != theirs.kind or len(ours.elements) != len(theirs.elements):
        return False
    if (ours.ordered and theirs.ordered) or len(ours.elements) > PARTS_LIMIT:
        return all(_same(a, b, depth - 1) for a, b in zip(ours.elements, theirs.elements, strict=True))
    left = list(ours.elements)
    for element in theirs.elements:
        match = next((other for other in left if _same(other, element, depth - 1)), None)
        if match is None:
            return False
        left.remove(match)
    return True


_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[clr| ]*\})?(.*)\\end\{\1\}", re.DOTALL)


def _matrix(text: str) -> Parts | None:
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    rows = [row.split("&") for row in match[2].strip().removesuffix("\\\\").split("\\\\")]
    shape = "x".join(str(len(row)) for row in rows)
    return Parts(f"matrix {shape}", tuple(normalise(cell) for row in rows for cell in row))


_BRACKETS = {"(": ")", "[": "]", "\\{": "\\}", "{": "}"}
_PIECE = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)


def _collection(text: str) -> Parts | None:
    r"""Take a union, a list, a tuple, an interval, a set or `a \pm b` apart; None if the text is a single thing."""
    parts = _split(text, "\\cup")
    if len(parts) > 1:
        return Parts("union", tuple(parts), ordered=False)
    parts = _split(text, ",")
    if len(parts) > 1:
        # A bare list is a list of solutions, whose order says nothing; so is a set.
        return Parts("set", tuple(normalise(branch) for part in parts for branch in _branches(part)), ordered=False)
    opener = next((one for one in _BRACKETS if text.startswith(one)), None)
    closer = next((one for one in _BRACKETS.values() if text.endswith(one)), None)
    if opener and closer and _encloses(text):
        parts = _split(text[len(opener) : -len(closer)], ",")
        if opener == "\\{" or (opener == "{" and len(parts) > 1):
            return Parts("set", tuple(normalise(branch) for part in parts for branch in _branches(part)), ordered=False)
        if len(parts) > 1:
            return Parts(opener + closer, tuple(map(normalise, parts)))
    branches = _branches(text)
    return Parts("set", tuple(branches), ordered=False) if len(branches) > 1 else None


def _branches(text: str) -> list[str]:
    pieces = _PIECE.findall(text)
    if "\\pm" not in pieces:
        return [text]
    upper = {"\\pm": "+", "\\mp": "-"}
    lower = {"\\pm": "-", "\\mp": "+"}
    return ["".join(signs.get(piece, piece) for piece in pieces).strip() for signs in (upper, lower)]


_RELATIONS = ("=", "<", ">", "\\le", "\\ge", "\\ne")


def _relation(text: str) -> Parts | None:
    pieces = _PIECE.findall(text)
    kinds = [piece for piece in pieces if piece in _RELATIONS]
    if not kinds:
        return None
    sides = [""]
    for piece in pieces:
        if piece in _RELATIONS:
            sides.append("")
        else:
            sides[-1] += piece
    return Parts(" ".join(kinds), tuple(side.strip() for side in sides))


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator that stands outside all brackets; a half-open interval's brackets count as a pair."""
    parts = [""]
    depth = 0
    for piece in _PIECE.findall(text):
        if piece in _BRACKETS:
            depth += 1
        elif piece in _BRACKETS.values():
            depth -= 1
        if piece == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return [part.strip() for part in parts]


def _encloses(text: str) -> bool:
    """Return whether the bracket a text begins with is the one it ends with."""
    depth = 0
    pieces = _PIECE.findall(text)
    for place, piece in enumerate(pieces):
        depth += (piece in _BRACKETS) - (piece in _BRACKETS.values())
        if depth == 0:
            return place == len(pieces) - 1
    return False


def _without_brackets(text: str) -> str:
    r"""Take off brackets around a single thing, as in `(5)` or `\{5\}`; those of `(1,234)` mean a pair."""
    for _ in range(DEPTH_LIMIT):
        opener = next((one for one in _BRACKETS if text.startswith(one)), None)
        if opener is None or "," in text or not text.endswith(_BRACKETS[opener]) or not _encloses(text):
            break
        text = text[len(opener) : -len(_BRACKETS[opener])].strip()
    return text
