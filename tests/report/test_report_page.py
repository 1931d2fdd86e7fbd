"""The page: its curves and numbers, that it loads nothing, and that no response can become markup."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from milepost.cli import cli
from milepost.report import read_runs, render
from milepost.report.curves import MAX_POINTS, Line, sections, timing
from milepost.report.page import MAX_SAMPLES, page_data
from report_runs import line, small_run, write_lines, write_run


def charts(*folders: Path) -> dict[str, Any]:
    return {chart["title"]: chart for part in sections(read_runs(folders)) for chart in part["charts"]}


def sample(**values: Any) -> dict[str, Any]:
    base = {"kind": "rollout", "rollout": 0, "prompt": "p", "text": "t", "label": "l", "rewards": {"reward": 1.0}}
    return {**base, "status": "completed", "prompt_len": 1, "response_len": 1, **values}


def embedded(html: str) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert match
    return json.loads(match[1])


def test_metrics_become_lines_with_the_catalogues_words(tmp_path: Path) -> None:
    found = charts(small_run(tmp_path / "a"))
    reward = found["rollout/raw_reward"]
    assert reward["metrics"][0]["meaning"].startswith("Mean reward of the rollout's samples")
    assert (reward["unit"], reward["axis"]) == ("reward", "rollout")
    (only,) = reward["lines"]
    assert (only["x"], only["y"], only["low"]) == ([0, 1], [0.2, 0.4], None)
    # two that belong together share a chart; what is not finite leaves a gap
    ratio = found["train/ratio_max and ratio_min"]
    assert [(one["label"], one["y"]) for one in ratio["lines"]] == [
        ("ratio_max", [1.0, 1.5]),
        ("ratio_min", [1.0, 0.5]),
    ]
    assert found["train/loss"]["lines"][0]["y"] == [0.5, None]
    accuracy = found["eval/toy/accuracy"]
    assert (accuracy["axis"], accuracy["lines"][0]["x"]) == ("rollouts trained", [0, 2])
    assert accuracy["metrics"][0]["meaning"] == "Mean reward on the held-out set toy, over all of its samples."


def test_the_memory_behind_all_phases_is_one_chart(tmp_path: Path) -> None:
    lines = [
        line("perf", 0, perf__memory_generate=100.0, perf__memory_sleep=3.0, perf__memory_actor=90.0),
        line("perf", 1, perf__memory_generate=101.0, perf__memory_sleep=3.5, perf__memory_actor=95.0),
    ]
    chart = charts(write_run(tmp_path / "a", lines))["perf/memory_…"]
    assert [(one["label"], one["y"]) for one in chart["lines"]] == [
        ("generate", [100.0, 101.0]),
        ("sleep", [3.0, 3.5]),
        ("actor", [90.0, 95.0]),
    ]
    assert chart["unit"] == "gigabytes"
    (meaning,) = {metric["meaning"] for metric in chart["metrics"]}  # shown once
    assert "at the end of a phase (generate, sleep, actor" in meaning


def test_what_never_changes_is_listed_and_not_drawn(tmp_path: Path) -> None:
    (rollouts,) = [part for part in sections(read_runs([small_run(tmp_path / "a")])) if part["key"] == "rollout"]
    assert [(one["name"], one["value"]) for one in rollouts["constant"]] == [("rollout/truncated", 0.0)]
    assert [chart["title"] for chart in rollouts["charts"]] == ["rollout/raw_reward"]


def test_sets_and_tries_share_charts(tmp_path: Path) -> None:
    metrics = {f"eval/{name}/{kind}": 0.5 for name in ("a", "b") for kind in ("accuracy", "pass@1", "pass@4")}
    lines = [{**line("eval", i), **{name: value + i for name, value in metrics.items()}} for i in (0, 1)]
    found = charts(write_run(tmp_path / "run", lines))
    assert list(found) == ["eval/…/accuracy", "eval/a/pass@k", "eval/b/pass@k"]
    assert [one["label"] for one in found["eval/…/accuracy"]["lines"]] == ["a", "b"]
    assert [one["label"] for one in found["eval/a/pass@k"]["lines"]] == ["pass@1", "pass@4"]


def test_seeds_are_a_mean_within_their_range(tmp_path: Path) -> None:
    folders = [small_run(tmp_path / f"g-seed{i}", seed=i, shift=0.3 * i) for i in range(2)]
    write_lines(
        folders[1] / "metrics.jsonl", [line("rollout", i, rollout__raw_reward=r) for i, r in enumerate((0.5, 0.7, 0.9))]
    )
    other = small_run(tmp_path / "other")
    found = charts(*folders, other)
    mean, plain = found["rollout/raw_reward"]["lines"]
    assert (mean["label"], mean["x"]) == ("g", [0, 1, 2])
    assert mean["y"] == pytest.approx([0.35, 0.55, 0.9])  # one seed alone has come to rollout 2
    assert (mean["low"], mean["high"]) == ([0.2, 0.4, 0.9], [0.5, 0.7, 0.9])
    assert (plain["label"], plain["low"], plain["color"]) == ("other", None, 1)


def test_long_lines_are_thinned_and_keep_their_extremes() -> None:
    y = [math.sin(i / 50) for i in range(20_000)]
    y[7_777], y[12_345] = 9.0, -9.0
    drawn = Line("a", 0, list(range(20_000)), y).to_json()
    assert len(drawn["x"]) <= MAX_POINTS + 2
    assert (drawn["x"][0], drawn["x"][-1]) == (0, 19_999)
    assert (max(drawn["y"]), min(drawn["y"])) == (9.0, -9.0)
    assert drawn["x"] == sorted(set(drawn["x"]))


def test_the_parts_of_an_iteration_add_up(tmp_path: Path) -> None:
    (run,) = read_runs([small_run(tmp_path / "a")])
    assert timing(run) == {
        "x": [0, 1],
        "parts": [
            {"name": "generate", "y": [1.0, 1.5]},
            {"name": "train", "y": [2.0, 2.5]},
            {"name": "other", "y": [1.0, 1.0]},
        ],
    }


def test_a_response_cannot_become_markup(tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><!-- @@SCRIPT@@ \u2028 <img src=x onerror=alert(2)>"
    folder = small_run(tmp_path / "<b>run")
    write_lines(folder / "samples.jsonl", [sample(text=hostile, prompt=hostile, label={"a": hostile}, kind=hostile)])
    html = render(read_runs([folder]))
    assert embedded(html)["samples"][0]["text"] == hostile
    assert html.count("<script") == html.count("</script>") == 2
    assert "<title>&lt;b&gt;run - milepost report</title>" in html
    assert "alert(1)</script>" not in html
    assert "\u2028" not in html
    # the page's own code never makes markup of text
    assets = Path(__file__).parents[2] / "core" / "milepost" / "report" / "assets"
    for name in ("page.js", "charts.js"):
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", (assets / name).read_text()
        )


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    html = render(read_runs([small_run(tmp_path / "a")]))
    assert "default-src 'none'" in html
    assert set(re.findall(r"https?://[^\s\"')]+", html)) == {
        "https://github.com/leeoniya/uPlot"
    }  # in its licence comment
    assert not re.search(r"<(link|iframe|img|object|embed)\b|@import|url\(|\bsrc=", html)


def test_samples_are_capped_evenly_and_long_texts_shortened(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "a")
    samples = [sample(rollout=i, text="x" * 50_000 if i == 0 else "t") for i in range(1000)]
    samples[500]["rewards"] = {"reward": "NaN"}
    write_lines(folder / "samples.jsonl", samples)
    data = page_data(read_runs([folder]))
    assert (len(data["samples"]), data["num_samples"]) == (MAX_SAMPLES, 1000)
    assert [one["rollout"] for one in data["samples"][:3]] == [0, 2, 5]  # every 2.5th
    assert "30000 characters left out" in data["samples"][0]["text"]
    assert data["samples"][200]["rewards"] == {"reward": "NaN"}


def test_config_origins_and_alarms_are_shown(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "a")
    origins = {"optimizer.lr": "run.yaml:3", "run.seed": "default"}
    parts = {"components": {}, "plugins": {"milepost": "0.1.0"}, "versions": {}}
    (folder / "provenance.json").write_text(json.dumps({"origins": origins, **parts}))
    write_lines(folder / "alarms.jsonl", [{"name": "entropy", "rollout": 3, "message": "low"}, {"odd": 1}])
    data = page_data(read_runs([folder]))
    (lr,) = [row for row in data["config"] if row["path"] == "optimizer.lr"]
    assert lr == {"path": "optimizer.lr", "values": ["0.1"], "origins": ["run.yaml:3"]}
    assert data["plugins"] == [{"name": "milepost", "versions": ["0.1.0"]}]
    assert data["runs"][0]["alarms"] == [
        {"name": "entropy", "rollout": 3, "message": "low"},
        {"name": "alarm", "rollout": None, "message": '{"odd": 1}'},
    ]


def test_the_command_writes_the_page_or_prints_the_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small_run(tmp_path / "a")
    small_run(tmp_path / "b")

    def report(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["report", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert report("a") == "a/report.html\n"
    assert embedded((tmp_path / "a" / "report.html").read_text())["runs"][0]["name"] == "a"
    assert report("a", "b") == "report.html\n"
    assert report("a", "-o", "deep/er.html") == "deep/er.html\n"
    assert (tmp_path / "deep" / "er.html").is_file()
    assert [run["name"] for run in json.loads(report("a", "b", "--json"))["runs"]] == ["a", "b"]
    done = CliRunner().invoke(cli, ["report", "nowhere"])
    assert (done.exit_code, done.stderr) == (
        2,
        f"error: {tmp_path}/nowhere is no folder; expected the run folder of a training run\n",
    )
