"""Whole runs of the loop in this process: what they log, save and refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from milepost import loop
from milepost.config.loading import load_config
from milepost.config.plan import make_plan
from milepost.errors import CheckpointError, ConfigError, RunError
from milepost.run import RunSummary
from milepost.tracking.catalogue import describe
from runs import lines, numbers

Write = Callable[..., Path]


def train(path: Path, *sets: str) -> RunSummary:
    return loop.train(make_plan(load_config([path], sets)), progress=False)


def test_a_run_logs_every_rollout_step_and_evaluation_and_ends_with_a_summary(write_config: Write) -> None:
    summary = train(write_config())
    run_dir = summary.run_dir
    assert (summary.num_rollouts, summary.interrupted) == (4, False)
    assert [line["index"] for line in lines(run_dir, "rollout")] == [0, 1, 2, 3]
    assert [line["index"] for line in lines(run_dir, "step")] == [0, 1, 2, 3]
    # before, after two rollouts, after the last
    evaluations = lines(run_dir, "eval")
    assert [line["index"] for line in evaluations] == [0, 2, 4]
    accuracies = [line["eval/heldout/accuracy"] for line in evaluations]
    assert summary.evaluations == {"heldout": (accuracies[0], accuracies[-1])}
    assert f"heldout accuracy {accuracies[0]:.3f} -> {accuracies[-1]:.3f}" in str(summary)
    assert json.loads((run_dir / "summary.json").read_text())["num_rollouts"] == 4
    assert sorted(path.name for path in (run_dir / "checkpoints").iterdir()) == ["rollout-000002", "rollout-000003"]
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {"rollout", "eval/heldout"} == {sample["kind"] for sample in samples}


def test_every_logged_metric_is_in_the_catalogue(write_config: Write) -> None:
    run_dir = train(write_config(algorithm={"kl_loss_coef": 0.1}, rollout={"num_rollouts": 2})).run_dir
    names = {name for line in lines(run_dir) for name in line if "/" in name}
    assert [name for name in sorted(names) if describe(name) is None] == []
    assert {"train/kl_loss", "train/ppo_kl", "rollout/raw_reward", "perf/actor_train_time"} <= names


def test_on_policy_the_steps_own_log_probs_are_the_old_ones(write_config: Write) -> None:
    run_dir = train(write_config(rollout={"num_rollouts": 2})).run_dir
    first, second = lines(run_dir, "step")
    assert first["train/old_log_prob_diff"] == 0.0  # checked on the first rollout, where both are computed
    assert first["train/ratio_max"] == first["train/ratio_min"] == second["train/ratio_max"] == 1.0
    # the engine decodes token by token, the trainer runs packed sequences: equal up to float32
    assert max(first["train/log_prob_diff_max"], second["train/log_prob_diff_max"]) < 1e-4


def test_with_rate_zero_nothing_changes(write_config: Write) -> None:
    accuracies = [
        line["eval/heldout/accuracy"] for line in lines(train(write_config(), "optimizer.lr=0").run_dir, "eval")
    ]
    assert len(set(accuracies)) == 1


def test_equal_configs_give_equal_numbers_and_another_seed_others(write_config: Write) -> None:
    def run(directory: str, seed: int) -> list[dict[str, Any]]:
        return numbers(
            train(write_config(rollout={"num_rollouts": 2}), f"run.dir={directory}", f"run.seed={seed}").run_dir
        )

    first = run("a", 1)
    assert first == run("b", 1)
    assert first != run("c", 2)


def test_a_finished_run_says_so_and_keeps_its_metrics(write_config: Write, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_config(rollout={"num_rollouts": 2})
    summary = train(path)
    before = (summary.run_dir / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    assert train(path) == summary
    assert "already finished" in capsys.readouterr().out
    assert (summary.run_dir / "metrics.jsonl").read_bytes() == before


def test_a_longer_run_goes_on_where_the_shorter_one_ended(write_config: Write) -> None:
    train(write_config(), "rollout.num_rollouts=2")
    summary = train(write_config(), "rollout.num_rollouts=3")
    assert [line["index"] for line in lines(summary.run_dir, "rollout")] == [0, 1, 2]


def test_without_save_last_only_the_interval_saves(write_config: Write) -> None:
    sets = ("rollout.num_rollouts=3", "checkpoint.save_interval=2", "checkpoint.save_last=false")
    run_dir = train(write_config(), *sets).run_dir
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["rollout-000001"]


def test_resume_must_and_never(write_config: Write) -> None:
    path = write_config(rollout={"num_rollouts": 1})
    with pytest.raises(CheckpointError, match=r"no complete checkpoint, and checkpoint.resume is must"):
        train(path, "checkpoint.resume=must")
    train(path)
    with pytest.raises(CheckpointError, match=r"has checkpoints, and checkpoint.resume is never"):
        train(path, "checkpoint.resume=never")


def test_several_steps_per_rollout_move_the_ratio(write_config: Write) -> None:
    path = write_config(rollout={"num_rollouts": 2}, trainer={"steps_per_rollout": 2})
    first, second, *rest = lines(train(path).run_dir, "step")
    assert [line["index"] for line in rest] == [2, 3]
    assert first["train/ratio_max"] == 1.0
    assert second["train/ratio_max"] != 1.0


def test_a_constant_reward_stops_the_run_with_the_likely_cause(write_config: Write, workspace: Path) -> None:
    (workspace / "score.py").write_text("def score(sample):\n    return 0.0\n")
    path = write_config(rollout={"constant_reward_limit": 2})
    with pytest.raises(RunError, match=r"every reward was 0 in 2 rollouts in a row.*label"):
        train(path)


def test_a_filter_trains_on_groups_with_a_spread_alone(write_config: Write) -> None:
    path = write_config(rollout={"filter": "zero_variance", "num_rollouts": 2, "max_filter_rounds": 50})
    assert [line["rollout/zero_variance_groups"] for line in lines(train(path).run_dir, "rollout")] == [0.0, 0.0]


def test_a_generate_function_of_ones_own_with_two_turns(write_config: Write, workspace: Path) -> None:
    (workspace / "turns.py").write_text(
        "async def twice(task, engine):\n"
        "    first = await engine.generate()\n"
        "    told = first.observe([5, 6, 7])\n"
        "    second = told.then(await engine.generate(told.tokens))\n"
        "    assert not second.trainable[len(first):len(first) + 3].any()\n"
        "    return [second]\n"
    )
    path = write_config(rollout={"num_rollouts": 1, "generate": "turns:twice"}, eval={"datasets": []})
    assert lines(train(path).run_dir, "step")[0]["train/log_prob_diff_max"] < 1e-4
    for name, problem in (("turns:missing", "cannot be imported"), ("score:score", "is not an async function")):
        with pytest.raises(ConfigError, match=problem):
            train(path, f"rollout.generate={name}", "run.dir=other")
