"""The report's page: one HTML file with everything in it, which loads nothing from anywhere.

All that comes from runs is one block of JSON. The page's script puts it into the document as text, never as markup, so
that a response may contain whatever it likes; and a content security policy forbids the page any request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from typing import Any

from milepost import __version__
from milepost.config.render import flow
from milepost.report.curves import palette, sections, timing
from milepost.report.runs import RunData
from milepost.report.summary import LAST, Summary, group_figures, summarise_run

MAX_SAMPLES = 400
"""Samples on a page, divided between the runs; evenly spread over each run where it kept more."""
MAX_TEXT = 20_000
"""Characters of a prompt or response; the middle of longer ones is left out."""


def render(runs: Sequence[RunData]) -> str:
    """Return the report of one or several runs as HTML."""
    assets = files("milepost.report") / "assets"

    def asset(name: str) -> str:
        return (assets / name).read_text(encoding="utf-8")

    title = runs[0].name if len(runs) == 1 else " · ".join(palette(runs))
    parts = {
        "@@TITLE@@": _escaped(f"{title} - milepost report"),
        "@@STYLE@@": asset("uplot.min.css") + asset("page.css"),
        "@@DATA@@": _script_safe(json.dumps(page_data(runs), ensure_ascii=False, allow_nan=False)),
        "@@SCRIPT@@": asset("uplot.min.js") + "\n" + asset("charts.js") + asset("page.js"),
    }
    # Piece by piece, so that nothing inside the data is taken for a placeholder.
    page, rest = [], asset("page.html")
    for mark, text in parts.items():
        before, _, rest = rest.partition(mark)
        page += [before, text]
    return "".join([*page, rest])


def page_data(runs: Sequence[RunData]) -> dict[str, Any]:
    """Return everything the page shows, as plain JSON data without NaN."""
    summaries = [summarise_run(run) for run in runs]
    colors = palette(runs)
    share = max(1, MAX_SAMPLES // len(runs))
    return {
        "version": __version__,
        "last": LAST,
        "runs": [
            {**asdict(summary), "color": colors[run.group], "timing": timing(run), "alarms": _alarms(run)}
            for run, summary in zip(runs, summaries, strict=True)
        ],
        "groups": [_group(name, number, summaries) for name, number in colors.items()],
        "sections": sections(runs),
        "samples": [sample for number, run in enumerate(runs) for sample in _samples(run, number, share)],
        "num_samples": sum(len(run.samples) for run in runs),
        "config": _config(runs),
        "plugins": _plugins(runs),
    }


def _group(name: str, color: int, summaries: Sequence[Summary]) -> dict[str, Any]:
    members = [summary for summary in summaries if summary.group == name]
    figures = {key: asdict(spread) for key, spread in group_figures(members).items()}
    return {"name": name, "color": color, "runs": [summary.name for summary in members], "figures": figures}


def _samples(run: RunData, number: int, share: int) -> list[dict[str, Any]]:
    count = min(share, len(run.samples))
    chosen = [run.samples[i * len(run.samples) // count] for i in range(count)]
    return [
        {
            "run": number,
            "kind": str(sample.get("kind", "rollout")),
            "rollout": sample.get("rollout"),
            "prompt": _shortened(str(sample.get("prompt", ""))),
            "text": _shortened(str(sample.get("text", ""))),
            "label": None if sample.get("label") is None else _shortened(_plain(sample["label"])),
            "rewards": {str(name): _finite(value) for name, value in dict(sample.get("rewards") or {}).items()},
            "status": str(sample.get("status", "")),
            "prompt_len": sample.get("prompt_len"),
            "response_len": sample.get("response_len"),
        }
        for sample in chosen
    ]


def _alarms(run: RunData) -> list[dict[str, Any]]:
    known = ("name", "rollout", "message")
    return [
        {
            "name": str(alarm.get("name", "alarm")),
            "rollout": alarm.get("rollout"),
            # Whatever else an alarm says is shown as it is.
            "message": str(alarm.get("message") or json.dumps({k: v for k, v in alarm.items() if k not in known})),
        }
        for alarm in run.alarms
    ]


def _config(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return every setting with its value in each run, as `{path, values, origins}`."""
    paths = dict.fromkeys(path for run in runs for path in run.config)
    return [
        {
            "path": path,
            "values": [flow(run.config[path]) if path in run.config else None for run in runs],
            "origins": [run.origins.get(path, "") for run in runs],
        }
        for path in paths
    ]


def _plugins(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    names = sorted({name for run in runs for name in run.plugins})
    return [{"name": name, "versions": [run.plugins.get(name) for run in runs]} for name in names]


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    half = MAX_TEXT // 2
    return f"{text[:half]}\n[… {len(text) - MAX_TEXT} characters left out …]\n{text[-half:]}"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _finite(value: Any) -> Any:
    """Return a reward as JSON can hold it: metrics files spell infinities and NaN as texts."""
    return value if isinstance(value, int | float | str) else str(value)


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _script_safe(text: str) -> str:
    """Return JSON that cannot end the script element it stands in; the escapes mean the same inside JSON's strings."""
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
