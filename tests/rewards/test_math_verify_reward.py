"""The Math-Verify reward."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from milepost.samples import Sample, Task
from milepost_math.verify import MathVerify


def sample(text: str, label: object) -> Sample:
    return Sample(
        task=Task(0, "", (1,), label),
        tokens=np.array([1], np.int32),
        trainable=np.array([False]),
        log_probs=np.array([np.nan], np.float32),
        versions=np.array([-1], np.int32),
        text=text,
    )


@pytest.mark.parametrize(
    ("text", "label", "score"),
    [
        ("hm</think> so \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("The answer is $\\frac{2}{4}$", "\\frac12", 1.0),
        ("\\boxed{42}", 42, 1.0),
        ("\\boxed{41}", 42, 0.0),
        ("\\boxed{2}", ["1", "2"], 1.0),
        ("\\boxed{x^2+2x+1}", "\\boxed{(x+1)^2}", 1.0),
        ("\\boxed{42}</think> I do not know", 42, 0.0),
        ("", 42, 0.0),
    ],
)
def test_scores(text: str, label: object, score: float) -> None:
    assert MathVerify().score(sample(text, label)) == score


def test_require_think() -> None:
    assert MathVerify(require_think=True).score(sample("\\boxed{42}", 42)) == 0.0
    assert MathVerify(require_think=True).score(sample("hm</think>\\boxed{42}", 42)) == 1.0


def test_a_missing_or_unreadable_label_is_an_error() -> None:
    with pytest.raises(ValueError, match="math needs a label"):
        MathVerify().score(sample("\\boxed{42}", None))
    with pytest.raises(ValueError, match="cannot read the label"):
        MathVerify().score(sample("\\boxed{42}", "$ $"))


def test_it_needs_no_signals_so_any_thread_will_do() -> None:
    scores: list[float] = []
    thread = threading.Thread(target=lambda: scores.append(MathVerify().score(sample("\\boxed{42}", 42))))
    thread.start()
    thread.join()
    assert scores == [1.0]
