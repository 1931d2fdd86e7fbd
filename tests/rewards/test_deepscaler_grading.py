"""Grading by rules: pairs of an answer and a label, each judged by hand."""

from __future__ import annotations

import time

import pytest
from milepost_deepscaler.answers import answer_of, last_box
from milepost_deepscaler.grading import acceptable, is_correct

RIGHT = [
    # Numbers.
    ("5", "5"),
    (" 5 ", "5"),
    ("5.", "5"),
    ("+5", "5"),
    ("5.00", "5"),
    ("-3", "-3"),
    ("−3", "-3"),
    ("204", "204.0"),
    ("1,234,567", "1234567"),
    ("1{,}234", "1234"),
    ("1\\,234", "1,234"),
    ("10\\!000", "10000"),
    (".5", "0.5"),
    ("1e3", "1000"),
    ("3 \\times 10^{8}", "300000000"),
    ("(5)", "5"),
    ("\\boxed{5}", "5"),
    ("5", "$\\boxed{5}$"),
    ("5", "\\boxed{5}"),
    # Fractions.
    ("\\frac{1}{2}", "1/2"),
    ("\\dfrac{1}{2}", "\\frac{1}{2}"),
    ("\\tfrac12", "\\frac{1}{2}"),
    ("\\frac12", "0.5"),
    ("0.5", "\\frac{1}{2}"),
    ("-\\frac{1}{2}", "\\frac{-1}{2}"),
    ("3\\frac{1}{2}", "7/2"),
    ("3 1/2", "\\frac72"),
    ("½", "\\frac{1}{2}"),
    ("\\frac{\\pi}{2}", "\\frac\\pi2"),
    # Signs, units, texts.
    ("50\\%", "50"),
    ("50%", "50\\%"),
    ("90^\\circ", "90"),
    ("90°", "90^{\\circ}"),
    ("\\$5.00", "5"),
    ("$5$", "5"),
    ("12\\text{ cm}", "12"),
    ("12 \\text{ cm}^2", "12"),
    ("12 inches", "12"),
    ("60 miles per hour", "60"),
    ("\\text{Monday}", "Monday"),
    ("monday", "Monday"),
    ("\\text{(A)}", "A"),
    ("\\mathrm{B}", "\\text{B}"),
    # Formulas.
    ("x=5", "5"),
    ("x = \\frac{3}{4}", "\\frac34"),
    ("2\\sqrt{2}", "\\sqrt{8}"),
    ("\\sqrt2", "\\sqrt{2}"),
    ("√2", "\\sqrt{2}"),
    ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}"),
    ("\\sqrt[3]{2}", "2^{1/3}"),
    ("2x+1", "1+2x"),
    ("(x+1)(x-1)", "x^2-1"),
    ("x²-1", "x^{2}-1"),
    ("2\\pi", "2π"),
    ("\\sin^2 x", "1-\\cos^2 x"),
    ("\\log_2 3", "\\frac{\\ln 3}{\\ln 2}"),
    ("\\left(\\frac{1}{2}\\right)^n", "2^{-n}"),
    ("\\binom{n}{2}", "\\dbinom{n}{2}"),
    ("1+2i", "2i+1"),
    ("|x|", "\\lvert x \\rvert"),
    ("8", "2^3"),
    # Tuples, sets, intervals, lists.
    ("(1, 2)", "(1,2)"),
    ("\\left( 1,\\ \\frac{2}{4-1} \\right)", "(1, 2/(4-1))"),
    ("(0.5, 3)", "\\left(\\frac12, 3\\right)"),
    ("\\{2, 1\\}", "\\{1,2\\}"),
    ("\\left\\{1, 2\\right\\}", "\\lbrace 2, 1\\rbrace"),
    ("1, -2", "-2,1"),
    ("x=1 \\text{ or } x=2", "1,2"),
    ("[0, \\infty)", "[0,\\infty)"),
    ("(-\\infty, 0.5] \\cup (2, 3)", "(2,3)\\cup(-\\infty,\\frac{1}{2}]"),
    ("x \\in [0,1]", "[0,1]"),
    ("\\pm 3", "3,-3"),
    ("1 \\pm \\sqrt{2}", "1+\\sqrt2, 1-\\sqrt2"),
    ("((1,2),(3,4))", "((1, 2), (3, 4))"),
    ("\\begin{pmatrix} 1 & 0.5 \\\\ 0 & 1 \\end{pmatrix}", "\\begin{bmatrix}1&\\frac12\\\\0&1\\end{bmatrix}"),
    # Relations.
    ("x^2 + y^2 = 4", "4 = y^2+x^2"),
    ("x \\geq 3", "3 ≤ x"),
    ("x > 1/2", "x>0.5"),
]

WRONG = [
    ("6", "5"),
    ("-5", "5"),
    ("5", ""),
    ("50", "5"),
    ("0.33", "1/3"),
    ("0.3333333333333333", "1/3"),
    ("1.4142135623730951", "\\sqrt{2}"),
    ("3.14", "\\pi"),
    ("11/2", "1 1/2"),
    # A number wants a number, in lowest terms.
    ("47+35", "82"),
    ("2^3", "8"),
    ("8/2", "4"),
    ("\\frac{2}{4}", "\\frac{1}{2}"),
    ("\\frac{1}{4}+\\frac{1}{4}", "1/2"),
    ("82, 83, 84", "82"),
    ("82 \\text{ or } 83", "82"),
    # Structure matters.
    ("(2, 1)", "(1,2)"),
    ("(1,2]", "(1,2)"),
    ("[1,2]", "(1,2)"),
    ("\\{1,2\\}", "(1,2)"),
    ("(1,2,3)", "(1,2)"),
    ("\\{1,1\\}", "\\{1,2\\}"),
    ("(1,234)", "1234"),
    ("1,2", "1,3"),
    ("[0,1]", "[0,1] \\cup [2,3]"),
    ("3", "\\pm 3"),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1&2\\end{pmatrix}"),
    # Formulas.
    ("x+1", "x-1"),
    ("x", "y"),
    ("x^2", "2x"),
    ("\\sqrt{x^2}", "x"),
    ("\\sin x", "\\cos x"),
    ("x > 3", "x < 3"),
    ("x \\ge 3", "x > 3"),
    ("1011_2", "1011"),
    ("3:2", "2:3"),
    ("east", "seat"),
    ("\\text{Monday}", "Tuesday"),
    ("A", "B"),
    ("", "5"),
    ("1/0", "2/0"),
]

# Each would take for ever, fill the memory or overflow the stack of a naive evaluation.
HOSTILE = [
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    "1e400",
    "1e99999999",
    "10^{10^{10}}",
    "(((1+x)^{999})^{999})^{999}",
    "100000!",
    "5!!!!!!!!",
    "\\binom{10^9}{10^8}",
    "9" * 900,
    "9" * 100_000,
    "(" * 150 + "1" + ")" * 150,
    "{" * 100_000,
    "\\frac{" * 150,
    "\\frac" * 190,
    "\\sqrt" * 190,
    "\\text{" * 160,
    "-" * 290 + "1",
    "1+" * 149 + "1",
    "2^" * 140 + "2",
    "|" * 200,
    "1," * 400,
    "(1," * 250,
    "\\boxed{" * 130,
    "x" * 1000,
    "\\sin" * 70 + "x",
    "\\exp(\\exp(\\exp(\\exp(100))))",
    "__import__('os').system('true')",
    "\x00\ud800\u202e",
    "∑∫∂👍",
    "1" + "\\," * 400,
    "5" + " cm" * 300 + "x",
]


@pytest.mark.parametrize(("answer", "label"), RIGHT)
def test_right_answers(answer: str, label: str) -> None:
    assert is_correct(answer, label)


@pytest.mark.parametrize(("answer", "label"), WRONG)
def test_wrong_answers(answer: str, label: str) -> None:
    assert not is_correct(answer, label)


@pytest.mark.parametrize("answer", HOSTILE, ids=[text[:12].encode("ascii", "replace").decode() for text in HOSTILE])
@pytest.mark.parametrize("label", ["7", "x^2+1", "(1,2)", "2^{3}"])
def test_hostile_answers_are_wrong_at_once(answer: str, label: str) -> None:
    began = time.process_time()
    assert not is_correct(answer, label)
    assert not is_correct(label, answer)
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>hm</think> \\boxed{5}", "5"),
        ("hm</think>\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("hm</think>\\boxed{1} then \\boxed{2}", "2"),
        ("hm</think>\\boxed {3}", "3"),
        ("hm</think>\\fbox{3}", "3"),
        ("hm</think>\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("hm</think>\\boxed{\\boxed{4}}", "4"),
        ("a</think>\\boxed{1}</think>\\boxed{2}", "2"),
        # Nothing after the thought, or no thought.
        ("<think>\\boxed{5}</think> five", None),
        ("\\boxed{5}", None),
        ("<think>\\boxed{5}", None),
        ("hm</think>", None),
        ("hm</think>\\boxed{}", None),
        ("hm</think>\\boxed{  }", None),
        ("hm</think>\\boxed{1} \\boxed{", None),
        ("hm</think>\\boxed{1} \\boxed{2", None),
        ("hm</think>\\boxed 5", None),
        ("", None),
    ],
)
def test_the_answer_is_in_the_last_box_after_the_thought(text: str, answer: str | None) -> None:
    assert answer_of(text, require_think=True) == answer


def test_without_require_think_a_box_anywhere_counts_but_a_closed_thought_is_still_skipped() -> None:
    assert answer_of("so \\boxed{5}", require_think=False) == "5"
    assert answer_of("\\boxed{5}</think> no box", require_think=False) is None


def test_a_megabyte_of_boxes_is_searched_at_once() -> None:
    began = time.process_time()
    assert last_box("\\boxed{" * 150_000) is None
    assert last_box("\\boxed{1}" * 100_000) == "1"
    assert time.process_time() - began < 1.0


def test_labels_may_be_numbers_or_lists() -> None:
    assert acceptable(5) == ["5"]
    assert acceptable(0.5) == ["0.5"]
    assert acceptable(["1", 2]) == ["1", "2"]


@pytest.mark.parametrize("label", [None, "", [], [None], {"answer": 5}])
def test_a_missing_label_is_an_error(label: object) -> None:
    with pytest.raises(ValueError, match="deepscaler needs a label"):
        acceptable(label)
