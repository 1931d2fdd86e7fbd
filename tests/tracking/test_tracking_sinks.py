import json
import math
import struct
import subprocess
import sys

import pytest
from milepost.config.schema import RunConfig
from milepost.errors import ConfigError
from milepost.tracking import Tracker
from milepost.tracking.sinks import need_package
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2


def config(**track):
    return RunConfig(model={"path": "m"}, data={"path": "d.jsonl"}, reward={"name": "r"}, track=track)


def scalars(run_dir):
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, round(event.value, 6)) for event in events.Scalars(tag)] for tag in tags}


def log_rollout(tracker, i, reward):
    tracker.log("rollout", i, {"rollout/raw_reward": reward})
    tracker.log("step", 2 * i, {"train/loss": -reward})


def test_tensorboard_events_read_back_and_never_doubled(tmp_path):
    with Tracker(tmp_path, config=config(tensorboard=True), stdout=False) as tracker:
        tracker.truncate({})
        log_rollout(tracker, 0, 0.25)
        written = tracker.written()
        log_rollout(tracker, 1, 0.5)
    assert scalars(tmp_path) == {
        "rollout/raw_reward": [(0, 0.25), (1, 0.5)],
        "train/loss": [(0, -0.25), (2, -0.5)],
    }
    with Tracker(tmp_path, config=config(tensorboard=True), stdout=False) as tracker:
        tracker.truncate(written)
        log_rollout(tracker, 1, 0.75)
    assert scalars(tmp_path) == {
        "rollout/raw_reward": [(0, 0.25), (1, 0.75)],
        "train/loss": [(0, -0.25), (2, -0.75)],
    }


WANDB = """
import json, sys
from pathlib import Path
import wandb
from milepost.config.schema import RunConfig
from milepost.tracking import Tracker

track = {"wandb": {"project": "milepost-test", "mode": "offline"}}
config = RunConfig(model={"path": "m"}, data={"path": "d"}, reward={"name": "r"}, optimizer={"lr": 0.5}, track=track)
run_dir = Path(sys.argv[1])
with Tracker(run_dir, config=config, stdout=False) as tracker:
    tracker.truncate({})
    tracker.log("rollout", 0, {"rollout/raw_reward": 0.25})
    tracker.log("step", 0, {"train/loss": 1.5})
    written = tracker.written()
    tracker.log("step", 1, {"train/loss": 1.25})
with Tracker(run_dir, config=config, stdout=False) as tracker:
    tracker.truncate(written)
    tracker.log("step", 1, {"train/loss": 1.25}, rollout=0)
"""


def wandb_records(data):
    """Split a .wandb file: after 7 bytes of header a LevelDB log, blocks of 32 KiB of crc, length, type and payload."""
    assert data[:4] == b":W&B"
    at, payload = 7, b""
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        payload += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield wandb_internal_pb2.Record.FromString(payload)
            payload = b""


def read_wandb(folder):
    """What an offline run holds: its run record and its history."""
    (path,) = folder.glob("*.wandb")
    run, history = None, []
    for record in wandb_records(path.read_bytes()):
        if record.WhichOneof("record_type") == "run":
            run = record.run
        elif record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return run, [{key: x for key, x in line.items() if not key.startswith("_") or key == "_step"} for line in history]


def test_wandb_offline_run_and_its_resume(tmp_path):
    run_dir = tmp_path / "my-run"
    result = subprocess.run([sys.executable, "-c", WANDB, run_dir], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    folders = sorted((run_dir / "wandb").glob("offline-run-*"))  # their names begin with the time
    (first, history), (second, resumed) = map(read_wandb, folders)
    run_id = (run_dir / "wandb-id.txt").read_text().strip()
    assert first.run_id == second.run_id == run_id
    assert (first.project, first.display_name) == ("milepost-test", "my-run")
    assert json.loads(next(item.value_json for item in first.config.update if item.key == "optimizer"))["lr"] == 0.5
    assert history == [
        {"rollout/raw_reward": 0.25, "rollout": 0, "_step": 0},
        {"train/loss": 1.5, "rollout": 0, "step": 0, "_step": 1},
        {"train/loss": 1.25, "rollout": 0, "step": 1, "_step": 2},
    ]
    assert resumed == [{"train/loss": 1.25, "rollout": 0, "step": 1, "_step": 2}]  # the step it had before


def test_missing_package_is_a_config_error_with_the_command():
    with pytest.raises(ConfigError, match=r"track\.x: the package no_such_thing is not installed; run: pip install y"):
        need_package("no_such_thing", "track.x", "pip install y")


def test_tracking_imports_no_tracker_before_one_is_asked_for(tmp_path):
    program = (
        "import sys; from milepost.config.schema import RunConfig; from milepost.tracking import Tracker\n"
        "c = RunConfig(model={'path': 'm'}, data={'path': 'd'}, reward={'name': 'r'})\n"
        "with Tracker(sys.argv[1], config=c) as t: t.log('rollout', 0, {'rollout/raw_reward': 1.0})\n"
        "print({'torch', 'wandb', 'tensorboard', 'transformers'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "set()"


def test_tensorboard_takes_what_is_not_finite(tmp_path):
    with Tracker(tmp_path, config=config(tensorboard=True), stdout=False) as tracker:
        tracker.log("rollout", 0, {"rollout/raw_reward": math.nan})
    assert math.isnan(scalars(tmp_path)["rollout/raw_reward"][0][1])
