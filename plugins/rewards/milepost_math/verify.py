"""Math-Verify as a reward."""

from __future__ import annotations

from typing import Any

from math_verify import parse, verify
from milepost.samples import Sample

END_OF_THOUGHT = "</think>"
NO_TIMEOUT = 0
"""Math-Verify's own time limit is a signal, which works in a main thread alone; the kernel's kills the worker."""
LENGTH_LIMIT = 10_000
"""Characters at the end of a response in which an answer is looked for: parsing a megabyte takes minutes."""


class MathVerify:
    """Scores 1 if an answer found after the thought has the value of the label, else 0."""

    def __init__(self, *, require_think: bool = False, precision: int = 6) -> None:
        self._require_think = require_think
        self._precision = precision

    def score(self, sample: Sample) -> float:
        """Return 1.0 or 0.0; only the last `LENGTH_LIMIT` characters are read.

        Raises ValueError if the sample has no label, or one that Math-Verify cannot read.
        """
        _, closed, after = sample.text.partition(END_OF_THOUGHT)
        if not closed and self._require_think:
            return 0.0
        answers = parse((after if closed else sample.text)[-LENGTH_LIMIT:], parsing_timeout=NO_TIMEOUT)
        return float(any(self._matches(gold, answers) for gold in _golds(sample.task.label)))

    def _matches(self, gold: list[Any], answers: list[Any]) -> bool:
        return bool(verify(gold, answers, float_rounding=self._precision, timeout_seconds=NO_TIMEOUT))


def _golds(label: Any) -> list[list[Any]]:
    """Return what Math-Verify reads in a label: text (LaTeX or plain), a number, or a list of acceptable ones."""
    golds = []
    for one in label if isinstance(label, list | tuple) else [label]:
        if not isinstance(one, str | int | float) or not str(one).strip():
            raise ValueError(f"math needs a label: a text, a number, or a list of acceptable ones; given {label!r}")
        text = str(one)
        # Without dollars around it, LaTeX in a bare label would not be looked for.
        gold = parse(text if "$" in text or "\\boxed" in text else f"${text}$", parsing_timeout=NO_TIMEOUT)
        if not gold:
            raise ValueError(f"Math-Verify cannot read the label {text!r}; use the reward `deepscaler` for such labels")
        golds.append(gold)
    if not golds:
        raise ValueError("math needs a label; given an empty list")
    return golds
