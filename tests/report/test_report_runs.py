"""Reading run folders, their figures, and which of them are seeds of one experiment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from milepost.errors import DataError
from milepost.report import read_runs, summarise
from report_runs import small_run, write_lines


def test_a_run_in_figures(tmp_path: Path) -> None:
    (run,) = summarise(read_runs([small_run(tmp_path / "a")]))["runs"]
    assert run["evaluations"] == {
        "toy": {"before": 0.25, "after": 0.75, "best": 0.75, "best_at": 2, "num_evaluations": 2}
    }
    assert (run["num_rollouts"], run["planned_rollouts"], run["num_steps"], run["seconds"]) == (2, 2, 2, 9.0)
    assert run["reward_first"] == 0.2
    assert run["reward_last"] == pytest.approx(0.3)
    assert run["tokens_per_gpu_per_second"] == 200.0
    assert (run["finished"], run["seed"], run["num_alarms"]) == (True, 0, 0)


def test_a_run_that_was_killed_before_its_first_rollout(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "a")
    write_lines(folder / "metrics.jsonl", [])
    (folder / "summary.json").unlink()
    (run,) = summarise(read_runs([folder]))["runs"]
    assert (run["num_rollouts"], run["finished"], run["reward_last"], run["evaluations"]) == (0, False, None, {})


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "a")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "eval", "index": 3, "ro')
    (run,) = summarise(read_runs([folder]))["runs"]
    assert run["evaluations"]["toy"]["num_evaluations"] == 2


def test_seeds_of_one_name_are_a_group_with_mean_and_range(tmp_path: Path) -> None:
    folders = [small_run(tmp_path / f"grpo-seed{i}", seed=i, shift=0.1 * i) for i in range(3)]
    folders.append(small_run(tmp_path / "ppo-seed0"))
    first, second = summarise(read_runs(folders))["groups"]
    assert (first["name"], first["runs"]) == ("grpo", ["grpo-seed0", "grpo-seed1", "grpo-seed2"])
    after = first["figures"]["eval/toy/after"]
    assert after == {"mean": pytest.approx(0.85), "low": 0.75, "high": pytest.approx(0.95), "count": 3}
    assert first["figures"]["seconds"] == {"mean": 9.0, "low": 9.0, "high": 9.0, "count": 3}
    assert (second["name"], second["runs"]) == ("ppo-seed0", ["ppo-seed0"])


def test_runs_with_other_settings_are_no_seeds_of_one_another(tmp_path: Path) -> None:
    folders = [small_run(tmp_path / f"a-seed{i}", seed=i, optimizer={"lr": 0.1 * (i + 1)}) for i in range(2)]
    assert [group["name"] for group in summarise(read_runs(folders))["groups"]] == ["a-seed0", "a-seed1"]
    same_seed = [small_run(tmp_path / f"b-seed{i}", seed=7) for i in range(2)]
    assert len(summarise(read_runs(same_seed))["groups"]) == 2


def test_only_runs_that_are_called_seeds_may_have_data_of_their_own(tmp_path: Path) -> None:
    named = [small_run(tmp_path / f"a_s{i}", seed=i, data={"path": f"{i}.jsonl"}) for i in range(2)]
    bare = [small_run(tmp_path / f"b{i}", seed=i, data={"path": f"{i}.jsonl"}) for i in range(2)]
    equal = [small_run(tmp_path / f"c{i}", seed=i, data={"path": "all.jsonl"}) for i in range(2)]
    groups = summarise(read_runs([*named, *bare, *equal]))["groups"]
    assert [(group["name"], len(group["runs"])) for group in groups] == [("a", 2), ("b0", 1), ("b1", 1), ("c", 2)]


def test_folders_of_one_name_are_told_apart_by_what_stands_before(tmp_path: Path) -> None:
    runs = read_runs([small_run(tmp_path / "x" / "run"), small_run(tmp_path / "y" / "run", seed=1)])
    assert [run.name for run in runs] == ["x/run", "y/run"]


def test_what_is_no_run_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no metrics\.jsonl; expected the run folder"):
        read_runs([tmp_path])
    with pytest.raises(DataError, match="is no folder"):
        read_runs([tmp_path / "absent"])
    folder = small_run(tmp_path / "a")
    (folder / "provenance.json").write_text("{}")
    with pytest.raises(DataError, match=r"provenance\.json is broken"):
        read_runs([folder])


def test_plugins_of_a_run_without_provenance_are_those_of_its_checkpoint(tmp_path: Path) -> None:
    folder = small_run(tmp_path / "a")
    checkpoint = folder / "checkpoints" / "rollout-000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    (checkpoint / "state.json").write_text(json.dumps({"plugins": {"my-rewards": "1.2"}}))
    assert read_runs([folder])[0].plugins == {"my-rewards": "1.2"}
