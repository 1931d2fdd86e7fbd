r"""Formulas: a parser for the part of LaTeX that answers are written in, and equality of what it parses.

Nothing is handed to `eval` or to a computer algebra system. Rational numbers are compared exactly, everything else by
its value to 50 digits at a few fixed points, which takes a bounded time whatever the formula: nesting, length and the
size of powers are limited, and what goes over a limit is not equal to anything but its own text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import mpmath  # type: ignore[import-untyped]

LENGTH_LIMIT = 300
"""Characters of a formula."""
DEPTH_LIMIT = 40
"""Brackets inside brackets."""
BITS_LIMIT = 4000
"""Bits of an exact number's numerator or denominator."""
DIGITS_LIMIT = 2000
"""Decimal digits before the point of any value."""
FACTORIAL_LIMIT = 200

_context = mpmath.mp.clone()
_context.dps = 50
_CLOSE = _context.mpf(10) ** -35


class NotAFormulaError(ValueError):
    """The text is not a formula this module reads, or one over its limits."""


@dataclass(frozen=True, slots=True)
class Node:
    """A formula: an operation and what it is applied to; `number` and `name` carry a value instead."""

    op: str
    args: tuple[Node, ...] = ()
    number: Fraction = Fraction(0)
    name: str = ""


FUNCTIONS = frozenset(
    ["sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "exp", "ln", "log"]
)
_LETTER = re.compile(
    r"[A-Za-z]|\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|lambda|mu|nu|xi|rho|sigma|tau|phi|varphi|chi|"
    r"psi|omega|Gamma|Delta|Theta|Lambda|Pi|Sigma|Phi|Psi|Omega|infty|ell)"
)
_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d+)?|\.\d+)|(?P<command>\\[A-Za-z]+)|(?P<word>[A-Za-z]+)|(?P<mark>\*\*|[-+*/^_!(){}\[\]|]))"
)
_CLOSERS = {"(": ")", "{": "}", "[": "]"}


def parse(text: str) -> Node:
    """Parse a normalised formula. Raises NotAFormulaError if it is not one or goes over a limit."""
    if len(text) > LENGTH_LIMIT:
        raise NotAFormulaError(f"a formula of {len(text)} characters; at most {LENGTH_LIMIT} are read")
    return _Parser(_tokens(text)).whole()


def are_equal(first: Node, second: Node) -> bool:
    """Return whether two formulas have the same value: exactly if rational, else to 35 digits at every point tried.

    False where a value goes over a limit or is not finite.
    """
    try:
        left, right = exact(first), exact(second)
        if left is not None and right is not None:
            return left == right
        compared = False
        for point in range(4):
            a, b = _value(first, point), _value(second, point)
            if a is None and b is None:
                continue
            if a is None or b is None or abs(a - b) > _CLOSE * max(1, abs(a), abs(b)):
                return False
            compared = True
        return compared
    except NotAFormulaError:
        return False


def exact(node: Node) -> Fraction | None:
    """Return the value of a formula of rational numbers; None if it has anything else in it.

    Raises NotAFormulaError if a number becomes too big.
    """
    if node.op == "number":
        return _small(node.number)
    values = [exact(arg) for arg in node.args]
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return None
    if node.op == "add":
        return _small(sum(known, Fraction(0)))
    if node.op == "mul":
        product = Fraction(1)
        for value in known:
            product = _small(product * value)
        return product
    if node.op == "neg":
        return -known[0]
    if node.op == "inverse":
        return 1 / known[0] if known[0] else None
    return _exact_power(*known) if node.op == "pow" else None


def _exact_power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if exponent.denominator != 1 or (base == 0 and exponent <= 0):
        return None
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if abs(exponent) * bits > BITS_LIMIT:
        raise NotAFormulaError("a power is too big")
    return Fraction(base**exponent.numerator)


def _small(number: Fraction) -> Fraction:
    if max(number.numerator.bit_length(), number.denominator.bit_length()) > BITS_LIMIT:
        raise NotAFormulaError("a number is too big")
    return number


def _tokens(text: str) -> list[str]:
    tokens: list[str] = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise NotAFormulaError(f"{text[place : place + 10]!r} is not part of a formula")
        place = match.end()
        word = match["word"]
        if word is None:
            tokens.append((match["number"] or match["command"] or match["mark"]).replace("**", "^"))
        elif word in FUNCTIONS or word in ("sqrt", "pi"):
            tokens.append("\\" + word)
        elif len(word) > 2:
            # A word, not a product: `east` is not `seat`.
            raise NotAFormulaError(f"the word {word!r} is not part of a formula")
        else:
            tokens.extend(word)
    return tokens


class _Parser:
    """Recursive descent over tokens. Juxtaposition multiplies and binds as `*` does."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._place = 0
        self._depth = 0
        self._bars = 0

    def whole(self) -> Node:
        node = self._sum()
        if self._place < len(self._tokens):
            raise NotAFormulaError(f"{self._tokens[self._place]!r} comes unexpected")
        return node

    @property
    def _next(self) -> str:
        return self._tokens[self._place] if self._place < len(self._tokens) else ""

    def _take(self, expected: str | None = None) -> str:
        token = self._next
        if not token or (expected is not None and token != expected):
            raise NotAFormulaError(f"expected {expected or 'more'}, found {token or 'the end'}")
        self._place += 1
        return token

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > DEPTH_LIMIT:
            raise NotAFormulaError(f"nested deeper than {DEPTH_LIMIT}")

    def _sum(self) -> Node:
        self._enter()
        terms = [self._product()]
        while self._next in ("+", "-"):
            sign = self._take()
            term = self._product()
            terms.append(Node("neg", (term,)) if sign == "-" else term)
        self._depth -= 1
        return terms[0] if len(terms) == 1 else Node("add", tuple(terms))

    def _product(self) -> Node:
        factors = [self._signed()]
        while True:
            token = self._next
            if token in ("*", "\\cdot", "\\times"):
                self._take()
                factors.append(self._signed())
            elif token == "/":
                self._take()
                factors.append(Node("inverse", (self._signed(),)))
            elif self._begins_factor(token):
                factors.append(self._power())
            else:
                return factors[0] if len(factors) == 1 else Node("mul", tuple(factors))

    def _begins_factor(self, token: str) -> bool:
        if token == "|":
            return self._bars == 0
        return bool(token) and (token[0].isalnum() or token[0] in ".\\({[") and token not in ("\\cdot", "\\times")

    def _signed(self) -> Node:
        negative = False
        while self._next in ("+", "-"):
            negative ^= self._take() == "-"
        node = self._power()
        return Node("neg", (node,)) if negative else node

    def _power(self) -> Node:
        base = self._atom()
        if self._next == "!":
            self._take()
            base = Node("factorial", (base,))
        if self._next == "^":
            self._take()
            return Node("pow", (base, self._exponent()))
        return base

    def _exponent(self) -> Node:
        self._enter()
        node = self._signed()
        self._depth -= 1
        return node

    def _atom(self) -> Node:
        token = self._take()
        if token[0].isdigit() or token[0] == ".":
            if self._next == "_":
                raise NotAFormulaError("a number with a base")
            return Node("number", number=Fraction(token))
        if token in _CLOSERS:
            node = self._sum()
            self._take(_CLOSERS[token])
            return node
        if token == "|":
            self._bars += 1
            node = self._sum()
            self._bars -= 1
            self._take("|")
            return Node("abs", (node,))
        if token == "\\frac":
            return Node("mul", (self._group(), Node("inverse", (self._group(),))))
        if token == "\\binom":
            return Node("binomial", (self._group(), self._group()))
        if token == "\\sqrt":
            return self._root()
        if token[1:] in FUNCTIONS and token[0] == "\\":
            return self._function(token[1:])
        if token == "\\pi":
            return Node("constant", name="pi")
        if _LETTER.fullmatch(token):
            return self._variable(token)
        raise NotAFormulaError(f"{token!r} is not read")

    def _group(self) -> Node:
        opener = self._take()
        if opener not in ("{", "("):
            raise NotAFormulaError(f"expected an argument in braces, found {opener!r}")
        node = self._sum()
        self._take(_CLOSERS[opener])
        return node

    def _root(self) -> Node:
        degree = Node("number", number=Fraction(2))
        if self._next == "[":
            self._take()
            degree = self._sum()
            self._take("]")
        radicand = self._group() if self._next in ("{", "(") else self._atom()
        return Node("pow", (radicand, Node("inverse", (degree,))))

    def _function(self, name: str) -> Node:
        base: Node | None = None
        exponent: Node | None = None
        if self._next == "_" and name == "log":
            self._take()
            base = self._atom()
        if self._next == "^":
            self._take()
            exponent = self._exponent()
        if self._next in ("(", "{", "["):
            argument = self._atom()
        else:
            factors = [self._power()]
            while self._next and (self._next[0].isalnum() or self._next == "\\pi"):
                factors.append(self._power())
            argument = Node("mul", tuple(factors))
        node = Node("function", (argument,), name="ln" if base is not None else name)
        if base is not None:
            node = Node("mul", (node, Node("inverse", (Node("function", (base,), name="ln"),))))
        return node if exponent is None else Node("pow", (node, exponent))

    def _variable(self, token: str) -> Node:
        name = token.removeprefix("\\")
        if self._next == "_":
            self._take()
            subscript = self._take()
            if subscript == "{":
                subscript = ""
                while self._next and self._next != "}":
                    subscript += self._take()
                self._take("}")
            name = f"{name}_{subscript}"
        if name in ("e", "i"):
            return Node("constant", name=name)
        return Node("variable", name=name)


@lru_cache(maxsize=4096)
def _place_of(name: str, point: int) -> Any:
    """Return the complex value that stands for a variable: fixed, without a pattern, on both sides of zero."""
    seed = int.from_bytes(name.encode(), "big") * 2654435761 + (point + 1) * 40503
    real = _context.sqrt(2 + seed % 9973) % 3 - (1.5 if point % 2 else 0.0)
    imaginary = _context.sqrt(3 + seed % 7919) % 2 if point >= 2 else 0
    return _context.mpc(real, imaginary)


def _value(node: Node, point: int) -> Any | None:
    """Return the value of a formula at a point; None where it has none (0/0, a pole).

    Raises NotAFormulaError if it goes over a limit.
    """
    try:
        value = _OPERATIONS[node.op](node, point)
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        if isinstance(error, NotAFormulaError):
            raise
        return None
    return value if value is None or _context.isfinite(value) else None


def _values(node: Node, point: int) -> list[Any]:
    values = [_value(arg, point) for arg in node.args]
    if any(value is None for value in values):
        raise ZeroDivisionError
    return values


def _number(node: Node, point: int) -> Any:
    return _context.mpf(node.number.numerator) / node.number.denominator


def _add(node: Node, point: int) -> Any:
    return _context.fsum(_values(node, point))


def _mul(node: Node, point: int) -> Any:
    return _context.fprod(_values(node, point))


def _inverse(node: Node, point: int) -> Any:
    return 1 / _values(node, point)[0]


def _neg(node: Node, point: int) -> Any:
    return -_values(node, point)[0]


def _abs(node: Node, point: int) -> Any:
    return abs(_values(node, point)[0])


def _pow(node: Node, point: int) -> Any:
    base, exponent = _values(node, point)
    size = abs(base)
    # Compared as logarithms first: an unbounded power could take for ever or fill the memory.
    if abs(exponent) > 10 * DIGITS_LIMIT or (size > 0 and abs(_context.log10(size) * abs(exponent)) > DIGITS_LIMIT):
        raise NotAFormulaError("a power is too big")
    return base**exponent


def _factorial(node: Node, point: int) -> Any:
    (value,) = _values(node, point)
    return _context.mpf(math.factorial(_count(value)))


def _binomial(node: Node, point: int) -> Any:
    upper, lower = _values(node, point)
    return _context.mpf(math.comb(_count(upper), _count(lower)))


def _count(value: Any) -> int:
    number = int(_context.nint(value.real)) if abs(value) <= FACTORIAL_LIMIT else -1
    if number < 0 or number != value:
        raise NotAFormulaError(f"factorials and binomials are read for whole numbers up to {FACTORIAL_LIMIT}")
    return number


def _function_value(node: Node, point: int) -> Any:
    (value,) = _values(node, point)
    if abs(value) > DIGITS_LIMIT and node.name not in ("ln", "log"):
        raise NotAFormulaError("the argument of a function is too big")
    return _FUNCTIONS[node.name](value)


_FUNCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "sin": _context.sin,
    "cos": _context.cos,
    "tan": _context.tan,
    "cot": _context.cot,
    "sec": _context.sec,
    "csc": _context.csc,
    "arcsin": _context.asin,
    "arccos": _context.acos,
    "arctan": _context.atan,
    "sinh": _context.sinh,
    "cosh": _context.cosh,
    "tanh": _context.tanh,
    "exp": _context.exp,
    "ln": _context.ln,
    "log": _context.ln,
}
_CONSTANTS = {"pi": +_context.pi, "e": +_context.e, "i": _context.mpc(0, 1)}
_OPERATIONS: Mapping[str, Callable[[Node, int], Any]] = {
    "number": _number,
    "constant": lambda node, point: _CONSTANTS[node.name],
    "variable": lambda node, point: _place_of(node.name, point),
    "add": _add,
    "mul": _mul,
    "inverse": _inverse,
    "neg": _neg,
    "abs": _abs,
    "pow": _pow,
    "factorial": _factorial,
    "binomial": _binomial,
    "function": _function_value,
}
