"""Alarms over records made by hand, and where they are printed and kept."""

import json
import math

import pytest
from milepost.config.schema import RunConfig
from milepost.tracking import Tracker
from milepost.tracking.alarms import Alarms, critic_alarm, entropy_alarm, ratio_alarm
from milepost.tracking.catalogue import describe
from milepost.tracking.records import Record


def record(kind, rollout, index=None, **metrics):
    prefix = {"step": "train"}.get(kind, kind)
    named = {f"{prefix}/{name}": value for name, value in metrics.items()}
    assert all(describe(name) for name in named), "alarms read metrics that exist"
    return Record(kind, rollout if index is None else index, rollout, named, 0.0)


def raised(records, **settings):
    alarms = Alarms(**settings)
    return [(alarm.name, alarm.rollout) for one in records for alarm in alarms.look(one)]


def rollout(index, mean, low=0.0, high=1.0):
    return record("rollout", index, raw_reward=mean, reward_min=low, reward_max=high)


@pytest.mark.parametrize(
    ("message", "parts"),
    [
        (ratio_alarm(0.5, 0.01), ("not 1 on policy", "0.5 nats", "limit 0.01")),
        (entropy_alarm(0.01, 0.5, 0.1), ("collapsed", "0.01 nats", "from 0.5", "entropy_coef")),
        (critic_alarm(-0.3, 0.02), ("explains nothing", "-0.3", "critic.lr")),
    ],
)
def test_a_message_says_what_was_seen_and_what_to_try(message, parts):
    assert message is not None
    assert all(part in message for part in parts)


def test_no_alarm_within_the_limits():
    assert ratio_alarm(0.01, 0.01) is None
    assert entropy_alarm(0.051, 0.5, 0.1) is None
    assert entropy_alarm(0.0, 0.0, 0.1) is None  # a policy that was deterministic from the start
    assert critic_alarm(0.03, 0.02) is None


def test_a_ratio_that_is_not_one_alarms_at_the_first_step_of_a_rollout_alone():
    steps = [record("step", 0, 0, old_log_prob_diff=0.0), record("step", 0, 1, old_log_prob_diff=0.8)]
    assert raised(steps) == []
    bad = [record("step", 1, 2, old_log_prob_diff=0.02), record("step", 1, 3, old_log_prob_diff=0.5)]
    assert raised([*steps, *bad]) == [("ratio", 1)]
    assert raised([*steps, *bad], check_ratio=False) == []
    assert raised([record("step", 0, 0, old_log_prob_diff=math.nan)]) == [("ratio", 0)]


def test_an_alarm_comes_once_until_things_were_well_again():
    differences = [0.02, 0.03, 0.0, 0.04]
    steps = [record("step", i, old_log_prob_diff=x) for i, x in enumerate(differences)]
    assert raised(steps) == [("ratio", 0), ("ratio", 3)]


def entropy_run(mean, low):
    """Five rollouts of entropy 1, then twenty of a low one."""
    records = []
    for index in range(25):
        records += [rollout(index, mean), record("step", index, entropy=1.0 if index < 5 else low)]
    return records


def test_a_collapsed_entropy_alarms_while_problems_are_unsolved():
    assert raised(entropy_run(0.5, 0.09)) == [("entropy", 14)]  # ten in a row from rollout 5
    assert raised(entropy_run(0.9, 0.09)) == []  # solved: nothing is left to try
    assert raised(entropy_run(0.5, 0.11)) == []


def test_solved_is_between_the_extremes_that_were_ever_seen():
    # rewards from -1 to 1: a mean of 0.5 is three quarters of the way, 0.7 is more than four fifths
    wide = [rollout(-1, 0.0, low=-1.0, high=1.0)]
    assert raised([*wide, *entropy_run(0.5, 0.01)]) == [("entropy", 14)]
    assert raised([*wide, *entropy_run(0.7, 0.01)]) == []


def test_two_alarms_of_one_record_are_both_raised():
    start = entropy_run(0.5, 0.01)[: 2 * 14]
    assert raised([*start, record("step", 14, entropy=0.01, old_log_prob_diff=1.0)]) == [("ratio", 14), ("entropy", 14)]


def test_a_critic_that_explains_nothing_alarms_after_ten_rollouts():
    def run(values):
        # two steps a rollout carry the same number and count once
        return raised([record("critic", i, explained_variance=x) for i, x in enumerate(values) for _ in range(2)])

    assert run([0.0] * 9) == []
    assert run([0.0] * 10) == [("critic", 9)]
    assert run([0.0] * 9 + [0.5] + [0.0] * 9) == []
    assert run([0.0] * 5 + [math.nan] * 20 + [-1.0] * 5) == [("critic", 29)]  # undefined says nothing


def config(old_log_probs="auto"):
    return RunConfig(
        model={"path": "m"},
        data={"path": "d.jsonl"},
        reward={"name": "r"},
        trainer={"old_log_probs": old_log_probs},
    )


def kept(run_dir):
    return [json.loads(line) for line in (run_dir / "alarms.jsonl").read_text().splitlines()]


def test_alarms_are_printed_and_kept_and_a_resume_keeps_the_same(tmp_path, capsys):
    with Tracker(tmp_path, config=config()) as tracker:
        tracker.truncate({})
        tracker.log("step", 0, {"train/old_log_prob_diff": 0.5}, rollout=0)
        written = tracker.written()
        tracker.log("step", 1, {"train/old_log_prob_diff": 0.0}, rollout=1)
        tracker.log("step", 2, {"train/old_log_prob_diff": 0.7}, rollout=2)
    shown = capsys.readouterr().out
    assert shown.count("alarm: rollout") == 2
    assert "alarm: rollout 2: the ratio is not 1 on policy" in shown
    assert [(line["name"], line["rollout"]) for line in kept(tmp_path)] == [("ratio", 0), ("ratio", 2)]
    with Tracker(tmp_path, config=config()) as tracker:
        tracker.truncate(written)
        assert [line["rollout"] for line in kept(tmp_path)] == [0]
        tracker.log("step", 1, {"train/old_log_prob_diff": 0.6}, rollout=1)
    assert "alarm" not in capsys.readouterr().out  # raised before the resume, and not well since
    assert [line["rollout"] for line in kept(tmp_path)] == [0]


def test_engine_log_probs_need_no_ratio_of_one(tmp_path):
    with Tracker(tmp_path, config=config("engine"), stdout=False) as tracker:
        tracker.log("step", 0, {"train/old_log_prob_diff": 0.5}, rollout=0)
    assert kept(tmp_path) == []
