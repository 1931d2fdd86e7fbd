"""`milepost eval`, and evaluation on several sets, each with sampling and a reward of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from milepost import loop
from milepost.cli import cli
from milepost.config.loading import load_config
from milepost.config.plan import make_plan
from milepost.report import read_runs
from milepost.report.page import page_data
from milepost.rollout.evaluation import evaluation_table

Write = Callable[..., Path]

OTHER_REWARD = '''
def length(sample):
    """The number of characters, so that no response of training's reward could score it."""
    return 100.0 + len(sample.text)
'''

SEVERAL: dict[str, Any] = {
    "interval": 1,
    "datasets": [
        {"name": "greedy", "path": "heldout.jsonl@[:6]"},
        {
            "name": "sampled",
            "path": "heldout.jsonl@[6:]",
            "limit": 4,
            "samples_per_prompt": 4,
            "temperature": 1.0,
            "max_response_len": 5,
            "reward": {"name": "python", "function": "other:length"},
        },
    ],
}


@pytest.fixture
def several(write_config: Write, workspace: Path) -> Path:
    (workspace / "other.py").write_text(OTHER_REWARD)
    return write_config(rollout={"num_rollouts": 1}, eval=SEVERAL, track={"samples_per_rollout": 16})


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_several_sets_while_training_and_in_the_report(several: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = loop.train(make_plan(load_config(several)), progress=False).run_dir
    output = capsys.readouterr().out
    evaluations = [line for line in lines(run_dir / "metrics.jsonl") if line["kind"] == "eval"]
    # before and after, two sets each
    assert [line["index"] for line in evaluations] == [0, 0, 1, 1]
    greedy, sampled = evaluations[0], evaluations[1]
    assert 0.0 <= greedy["eval/greedy/accuracy"] <= 1.0
    assert sampled["eval/sampled/accuracy"] > 100.0  # its own reward
    assert sampled["eval/sampled/response_len"] <= 5.0  # its own limit
    assert {"eval/sampled/pass@1", "eval/sampled/pass@4"} <= sampled.keys()
    assert "eval/greedy/pass@1" not in greedy
    assert output.count("\nset  ") == 2  # a table after each evaluation
    samples = [line for line in lines(run_dir / "samples.jsonl") if line["kind"] == "eval/sampled"]
    assert all(sample["rewards"]["reward"] == 100.0 + len(sample["text"]) for sample in samples)
    data = page_data(read_runs([run_dir]))
    assert set(data["runs"][0]["evaluations"]) == {"greedy", "sampled"}
    (section,) = [part for part in data["sections"] if part["key"] == "eval"]
    assert "eval/…/accuracy" in [chart["title"] for chart in section["charts"]]
    origins = {row["path"]: row["origins"][0] for row in data["config"]}
    assert "run.yaml:" in origins["eval.datasets.1.limit"]
    assert origins["optimizer.eps"] == "default"
    assert data["plugins"]


def test_evaluating_without_training_gives_what_the_run_gave(several: Path, tmp_path: Path) -> None:
    run_dir = loop.train(make_plan(load_config(several)), progress=False).run_dir
    evaluations = [line for line in lines(run_dir / "metrics.jsonl") if line["kind"] == "eval"]

    def accuracies(*arguments: str) -> dict[str, float]:
        done = CliRunner().invoke(cli, ["eval", str(several), "--no-progress", "--json", *arguments])
        assert done.exit_code == 0, done.output
        printed = json.loads(done.stdout)
        return {name: metrics["accuracy"] for name, metrics in printed["results"].items()}

    before = accuracies("--run-dir", str(tmp_path / "apart"))
    after = accuracies("--run-dir", str(tmp_path / "apart"), "--checkpoint", str(run_dir))
    assert before == {
        "greedy": evaluations[0]["eval/greedy/accuracy"],
        "sampled": evaluations[1]["eval/sampled/accuracy"],
    }
    assert after == {
        "greedy": evaluations[2]["eval/greedy/accuracy"],
        "sampled": evaluations[3]["eval/sampled/accuracy"],
    }
    samples = lines(tmp_path / "apart" / "eval" / "samples.jsonl")
    assert len(samples) == 6 + 4 * 4
    saved = json.loads((tmp_path / "apart" / "eval" / "results.json").read_text())
    assert saved["policy"] == str(run_dir / "checkpoints" / "rollout-000000")
    assert not (tmp_path / "apart" / "checkpoints").exists()


def test_what_cannot_be_evaluated(several: Path, tmp_path: Path) -> None:
    cases = [
        (("--set", "eval.datasets=[]"), 2, "eval.datasets: is empty: there is nothing to evaluate"),
        (("--checkpoint", str(tmp_path)), 2, "has no complete checkpoint"),
        (("--rollout", "3"), 2, "give the run with --checkpoint RUN_DIR"),
    ]
    for arguments, code, message in cases:
        done = CliRunner().invoke(cli, ["eval", str(several), *arguments])
        assert (done.exit_code, message in done.stderr) == (code, True), done.stderr


def test_the_table_has_a_gap_where_a_set_was_not_measured() -> None:
    table = evaluation_table({"a": {"accuracy": 0.5, "response_len": 12.0}, "longer": {"accuracy": 1.0, "pass@4": 1.0}})
    assert table.splitlines() == [
        "set     accuracy  response_len  pass@4",
        "a          0.500        12.000       -",
        "longer     1.000             -   1.000",
    ]
