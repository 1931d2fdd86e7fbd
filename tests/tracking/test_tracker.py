import json
import math
import re
import subprocess
import sys

import numpy as np
import pytest
from milepost.config.schema import RunConfig
from milepost.errors import DataError
from milepost.samples import Sample, Status, Task
from milepost.tracking import Tracker
from milepost.tracking.records import read_lines, read_records


def config(**track):
    return RunConfig(model={"path": "m"}, data={"path": "d.jsonl"}, reward={"name": "r"}, track=track)


def sample(number, text="7", **kwargs):
    task = Task(number, f"{number}+1=", (1, 2, 3), label=str(number + 1))
    return Sample(
        task=task,
        tokens=np.arange(5, dtype=np.int32),
        trainable=np.array([False, False, False, True, True]),
        log_probs=np.zeros(5, np.float32),
        versions=np.zeros(5, np.int32),
        text=text,
        group=number,
        **kwargs,
    )


def metrics_lines(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def test_stdout_lines(tmp_path, capsys):
    with Tracker(tmp_path, config=config()) as tracker:
        tracker.log("perf", 0, {"perf/rollout_time": 1.23456789, "perf/tokens": 12})
        tracker.log("rollout", 0, {"rollout/raw_reward": np.float32(0.1)})
        tracker.log("step", 3, {"train/loss": 1e-9 / 3, "train/grad_norm": math.nan})
        tracker.say("hello")
    assert capsys.readouterr().out.splitlines() == [
        "perf 0: {'perf/rollout_time': 1.23457, 'perf/tokens': 12}",
        "rollout 0: {'rollout/raw_reward': 0.1}",
        "step 3: {'train/loss': 3.33333e-10, 'train/grad_norm': nan}",
        "hello",
    ]


def test_quiet_tracker_still_writes(tmp_path, capsys):
    with Tracker(tmp_path, config=config(), stdout=False) as tracker:
        tracker.log("perf", 0, {"perf/rollout_time": 1.0})
        tracker.say("hello")
    assert capsys.readouterr().out == ""
    assert len(metrics_lines(tmp_path)) == 1


def test_lines_stay_whole_beside_a_progress_bar(tmp_path):
    program = (
        "import sys; from pathlib import Path; from milepost.config.schema import RunConfig\n"
        "from milepost.tracking import Tracker\n"
        "c = RunConfig(model={'path': 'm'}, data={'path': 'd'}, reward={'name': 'r'})\n"
        "with Tracker(sys.argv[1], config=c, progress=sys.argv[2] == 'on') as t, t.bar(3, 'rollout') as bar:\n"
        "    for i in range(3):\n"
        "        bar.update(); bar.refresh(); t.log('rollout', i, {'rollout/raw_reward': 0.5})\n"
    )

    def run(progress):
        command = [sys.executable, "-c", program, tmp_path, progress]
        return subprocess.run(command, capture_output=True, text=True, check=True)

    shown = run("on")
    assert shown.stdout.splitlines() == [f"rollout {i}: {{'rollout/raw_reward': 0.5}}" for i in range(3)]
    assert re.search(r"rollout: .*3/3", shown.stderr)
    assert run("off").stderr == ""


def test_metrics_are_standard_json_and_exact(tmp_path):
    with Tracker(tmp_path, config=config(), stdout=False) as tracker:
        tracker.log("rollout", 4, {"rollout/raw_reward": 0.1 + 0.2})
        tracker.log("step", 9, {"train/loss": math.nan, "train/max": math.inf, "train/min": -math.inf, "train/n": 3})
        back = list(tracker.lines("step"))
    first, second = metrics_lines(tmp_path)
    assert list(first) == ["kind", "index", "rollout", "rollout/raw_reward", "time"]
    assert first["rollout/raw_reward"] == 0.30000000000000004
    del second["time"]
    assert second == {
        "kind": "step",
        "index": 9,
        "rollout": 4,
        "train/loss": "NaN",
        "train/max": "Infinity",
        "train/min": "-Infinity",
        "train/n": 3,
    }
    assert math.isnan(back[0]["train/loss"])
    assert (back[0]["train/max"], back[0]["train/min"], back[0]["train/n"]) == (math.inf, -math.inf, 3)


def test_each_line_is_readable_at_once(tmp_path):
    with Tracker(tmp_path, config=config(), stdout=False) as tracker:
        for i in range(3):
            tracker.log("rollout", i, {"rollout/raw_reward": 1.0})
            tracker.samples(i, [sample(i)])
            assert len(metrics_lines(tmp_path)) == i + 1
            assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == i + 1


def test_a_step_belongs_to_the_rollout_before_it(tmp_path):
    with Tracker(tmp_path, config=config(), stdout=False) as tracker:
        with pytest.raises(ValueError, match="step 0 was logged before any rollout"):
            tracker.log("step", 0, {"train/loss": 1.0})
        tracker.log("rollout", 3, {"rollout/raw_reward": 1.0})
        tracker.log("eval", 4, {"eval/a/accuracy": 1.0})
        tracker.log("step", 6, {"train/loss": 1.0})
        tracker.log("critic", 7, {"critic/loss": 1.0}, rollout=9)
        with pytest.raises(ValueError, match="cannot be called 'time'"):
            tracker.log("step", 7, {"time": 1.0})
    assert [(line["kind"], line["rollout"]) for line in metrics_lines(tmp_path)] == [
        ("rollout", 3),
        ("eval", 4),
        ("step", 3),
        ("critic", 9),
    ]


def test_resume_takes_back_what_came_after_the_checkpoint(tmp_path):
    with Tracker(tmp_path, config=config(), stdout=False) as tracker:
        tracker.truncate({})
        for i in range(2):
            tracker.log("rollout", i, {"rollout/raw_reward": float(i)})
            tracker.samples(i, [sample(i)])
        written = json.loads(json.dumps(tracker.written()))
        tracker.log("eval", 2, {"eval/a/accuracy": 0.0})
        tracker.samples(2, [sample(2)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "rollout", "ind')  # killed in the middle of a line
    with Tracker(tmp_path, config=config(), stdout=False) as tracker:
        assert [line["index"] for line in tracker.lines("eval")] == [2]
        tracker.truncate(written)
        assert tracker.written() == written
        tracker.log("eval", 2, {"eval/a/accuracy": 0.5})
        tracker.samples(2, [sample(5)])
    assert [(line["kind"], line["index"]) for line in metrics_lines(tmp_path)] == [
        ("rollout", 0),
        ("rollout", 1),
        ("eval", 2),
    ]
    assert metrics_lines(tmp_path)[-1]["eval/a/accuracy"] == 0.5
    assert [line["task"] for line in read_lines(tmp_path / "samples.jsonl")] == [0, 1, 5]
    with Tracker(tmp_path, config=config(), stdout=False) as tracker:
        tracker.truncate({})
    assert (tmp_path / "metrics.jsonl").read_text() == (tmp_path / "samples.jsonl").read_text() == ""


def test_resume_after_the_files_were_cut_or_deleted(tmp_path):
    with Tracker(tmp_path, config=config(), stdout=False) as tracker:
        tracker.log("rollout", 0, {"rollout/raw_reward": 0.0})
        tracker.log("rollout", 1, {"rollout/raw_reward": 0.0})
        tracker.samples(0, [sample(0)])
        written = tracker.written()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-5])
    (tmp_path / "samples.jsonl").unlink()
    with Tracker(tmp_path, config=config(), stdout=False) as tracker:
        tracker.truncate(written)
        tracker.log("rollout", 2, {"rollout/raw_reward": 0.0})
    assert [line["index"] for line in metrics_lines(tmp_path)] == [0, 2]
    assert b"\0" not in path.read_bytes()


def test_half_a_line_longer_than_the_read_block_is_dropped(tmp_path):
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"a": 1}\n{"text": "' + b"x" * 200_000)
    Tracker(tmp_path, config=config(), stdout=False).close()
    assert path.read_bytes() == b'{"a": 1}\n'


def test_samples_are_spread_over_the_groups(tmp_path):
    samples = [sample(i // 4) for i in range(16)]
    with Tracker(tmp_path, config=config(samples_per_rollout=4), stdout=False) as tracker:
        tracker.samples(0, samples)
        tracker.samples(1, samples[:2], kind="eval/a")
    lines = list(read_lines(tmp_path / "samples.jsonl"))
    assert [(line["kind"], line["rollout"], line["group"]) for line in lines] == [
        ("rollout", 0, 0),
        ("rollout", 0, 1),
        ("rollout", 0, 2),
        ("rollout", 0, 3),
        ("eval/a", 1, 0),
        ("eval/a", 1, 0),
    ]
    (tmp_path / "none").mkdir()
    with Tracker(tmp_path / "none", config=config(samples_per_rollout=0), stdout=False) as tracker:
        tracker.samples(0, samples)
    assert (tmp_path / "none" / "samples.jsonl").read_text() == ""


def test_sample_line(tmp_path):
    rewards = {"reward": 1.0, "format": math.nan}
    with Tracker(tmp_path, config=config(), stdout=False) as tracker:
        tracker.samples(3, [sample(6, text="<think>ü</think>7", rewards=rewards, status=Status.TRUNCATED)])
    (line,) = read_lines(tmp_path / "samples.jsonl")
    assert line == {
        "kind": "rollout",
        "rollout": 3,
        "task": 6,
        "group": 6,
        "prompt": "6+1=",
        "text": "<think>ü</think>7",
        "rewards": {"reward": 1.0, "format": "NaN"},
        "label": "7",
        "status": "truncated",
        "prompt_len": 3,
        "response_len": 2,
    }


def test_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": \n{"kind": "perf"}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: expected one JSON object per line"):
        list(read_records(tmp_path / "metrics.jsonl"))
    (tmp_path / "metrics.jsonl").write_text("[]\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl:1: expected a JSON object, found list"):
        list(read_records(tmp_path / "metrics.jsonl"))
    assert list(read_records(tmp_path / "absent.jsonl")) == []
