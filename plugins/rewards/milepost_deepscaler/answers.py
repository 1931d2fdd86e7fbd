"""Finding the answer in a response, and writing it in one form.

Every function is linear in its text or bounded by `LENGTH_LIMIT`: a policy writes these texts, and it may write
anything.
"""

from __future__ import annotations

import re
import unicodedata

END_OF_THOUGHT = "</think>"
LENGTH_LIMIT = 1000
"""Characters beyond which an answer is compared as it is written."""


def answer_of(text: str, *, require_think: bool) -> str | None:
    """Return what stands in the last box after the thought; None if there is no thought, no box or nothing in it."""
    _, closed, after = text.partition(END_OF_THOUGHT)
    if closed:
        text = after
    elif require_think:
        return None
    return last_box(text)


def last_box(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`; None if there is none, it is empty or unclosed."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    brace = re.compile(r"\\(?:boxed|fbox)\s*\{").match(text, start)
    if brace is None:
        return None
    end = closing_brace(text, brace.end() - 1)
    content = "" if end is None else text[brace.end() : end].strip()
    return content or None


def closing_brace(text: str, start: int) -> int | None:
    r"""Return where the brace that opens at `start` closes; `\{` and `\}` are ordinary characters. None if nowhere."""
    depth = 0
    place = start
    while place < len(text):
        character = text[place]
        if character == "\\":
            place += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return place
        place += 1
    return None


_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻", "0123456789+-")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻]+")
_SYMBOLS = {
    "−": "-",
    "–": "-",
    "×": "\\times ",
    "·": "\\cdot ",
    "⋅": "\\cdot ",
    "÷": "/",
    "⁄": "/",
    "∕": "/",
    "π": "\\pi ",
    "√": "\\sqrt ",
    "∞": "\\infty ",
    "∪": "\\cup ",
    "±": "\\pm ",
    "∓": "\\mp ",
    "≤": "\\le ",
    "≥": "\\ge ",
    "≠": "\\ne ",
    "∈": "\\in ",
    "°": "",
    "θ": "\\theta ",
    "%": "",
    "$": "",
    "~": " ",
}
# Longest first where one begins another.
_COMMANDS = [
    (re.compile(r"\\[$%]"), ""),
    (re.compile(r"(?<!\\)\\[()\[\]]"), ""),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"(\d)\\[,!;: ](?=\d{3}(?!\d))"), r"\1"),
    (re.compile(r"(?<!\\)\\[,;:!> ]|\\(?:quad|qquad|displaystyle|limits)(?![A-Za-z])"), " "),
    (re.compile(r"\\(?:left|right|[bB]igg?[lrm]?)(?![A-Za-z])\.?"), ""),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\[dt]binom(?![A-Za-z])"), r"\\binom"),
    (re.compile(r"\\(?:leq|leqslant)(?![A-Za-z])"), r"\\le "),
    (re.compile(r"\\(?:geq|geqslant)(?![A-Za-z])"), r"\\ge "),
    (re.compile(r"\\neq(?![A-Za-z])"), r"\\ne "),
    (re.compile(r"\\(?:lbrace)(?![A-Za-z])"), r"\\{"),
    (re.compile(r"\\(?:rbrace)(?![A-Za-z])"), r"\\}"),
    (re.compile(r"\\[lr]vert(?![A-Za-z])"), "|"),
    (re.compile(r"\\(?:div)(?![A-Za-z])"), "/"),
    (re.compile(r"\^\s*(?:\\circ(?![A-Za-z])|\{\s*\\circ\s*\})|\\degree(?![A-Za-z])"), ""),
    (re.compile(r"\\cdots(?![A-Za-z])|\\ldots(?![A-Za-z])|\\dots(?![A-Za-z])"), "..."),
]
_UNIT = (
    r"(?:degrees?|dollars?|cents?|percent|units?|square|cubic|sq|cu|"
    r"(?:milli|centi|kilo)?(?:meters?|metres?|grams?|liters?|litres?)|mm|cm|km|kg|mg|ml|mL|mph|"
    r"inch(?:es)?|in\.|foot|feet|ft|yards?|yd|miles?|seconds?|sec|minutes?|min|hours?|hrs?|days?|weeks?|months?|years?|"
    r"pounds?|lbs?|ounces?|oz|gallons?|points?|radians?|rad)"
)
_UNITS = re.compile(
    rf"(?<=[\d}})\s])\s*{_UNIT}(?:(?:\s+per\s+|\s*/\s*|\s+){_UNIT})*(?:\s*\^\s*\{{?\s*[23]\s*\}}?)?\s*$"
)
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|texttt|mbox|mathrm|mathbf|mathit|operatorname|rm)\s*\{")
_BLANKS = re.compile(r"\s+")
_ASSIGNED = re.compile(
    r"^(?:[A-Za-z](?:_\{?\w{1,3}\}?)?|[A-Za-z]\([A-Za-z]\)|\\[a-z]{2,7})\s*(?:=|\\in(?![A-Za-z]))\s*(?=[^=\s])"
)
_JOINED = re.compile(r"(?<=[\d\s)}])\s+(?:or|and)\s+(?=\S)")


def normalise(text: str) -> str:
    r"""Write an answer in one form: ASCII, `\frac{a}{b}`, no dollar, percent and degree signs, no units, no `x =`.

    A text longer than `LENGTH_LIMIT` only loses its outer spaces.
    """
    text = text.strip()
    if len(text) > LENGTH_LIMIT:
        return text
    while text.strip("$ ").startswith(("\\boxed", "\\fbox")) and (box := last_box(text)) is not None:
        text = box
    text = _SUPERSCRIPT.sub(lambda match: "^{" + match[0].translate(_SUPERSCRIPTS) + "}", text)
    text = re.sub(r"√\s*(\d+)", r"\\sqrt{\1}", text)
    text = re.sub(r"(\d)([½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])", r"\1 \2", text)
    text = unicodedata.normalize("NFKC", text)
    # First what is escaped (`\%`), then the bare signs.
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    for symbol, replacement in _SYMBOLS.items():
        text = text.replace(symbol, replacement)
    text = _unwrap_text(text)
    text = _BLANKS.sub(" ", text).strip().rstrip(".,;: ").strip()
    text = _JOINED.sub(", ", text)
    text = _UNITS.sub("", text).strip()
    text = text.removeprefix("=").strip()
    text = _ASSIGNED.sub("", text)
    return brace_arguments(text)


def key(text: str) -> str:
    """Return what two normalised answers must share to be the same text: without blanks and needless braces.

    Words lose their case; single letters keep it, since they are variables.
    """
    text = re.sub(r"\{(\w)\}", r"\1", text) if "\\frac" not in text else text
    text = re.sub(r"(?<![A-Za-z\\])[A-Za-z]{3,}", lambda match: match[0].lower(), text)
    # A blank between digits means something: `1 1/2` is not `11/2`.
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def brace_arguments(text: str) -> str:
    r"""Put braces around the arguments of `\frac`, `\binom` and `\sqrt` where TeX lets them be left out."""
    place = 0
    while (match := re.compile(r"\\(frac|binom|sqrt)(?![A-Za-z])").search(text, place)) is not None:
        place = match.end()
        argument = place
        if match[1] == "sqrt" and (index := re.compile(r"\s*\[[^\]\[]*\]").match(text, place)) is not None:
            argument = index.end()
        for _ in range(1 if match[1] == "sqrt" else 2):
            start = argument
            while start < len(text) and text[start] == " ":
                start += 1
            if start == len(text):
                break
            if text[start] == "{":
                end = closing_brace(text, start)
                if end is None:
                    return text
                text = text[:argument] + text[start:]
                argument += end + 1 - start
            else:
                one = re.compile(r"\\[A-Za-z]+|.").match(text, start)
                if one is None or one[0] in ("(", "\\frac", "\\sqrt", "\\binom"):
                    break
                text = text[:argument] + "{" + one[0] + "}" + text[one.end() :]
                argument += len(one[0]) + 2
    return text


def _unwrap_text(text: str) -> str:
    r"""Replace `\text{abc}` and the like by what is inside, set off by blanks."""
    while (match := _TEXT.search(text)) is not None:
        end = closing_brace(text, match.end() - 1)
        inside = text[match.end() :] if end is None else text[match.end() : end]
        rest = "" if end is None else text[end + 1 :]
        text = f"{text[: match.start()]} {inside} {rest}"
    return text
