"""A plan on its way to another process, and the failures that come back."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from milepost import registry
from milepost.cluster.failures import Failure, WorkerError
from milepost.cluster.messages import PlanMessage
from milepost.config.loading import load_config
from milepost.config.plan import Plan, make_plan
from milepost.errors import CheckpointError, ConfigError, MilepostError, PluginError, Problem


@pytest.fixture
def plan(write_config: Callable[..., Path], workspace: Path) -> Iterator[Plan]:
    (workspace / "in_house.py").write_text(
        "import milepost\n"
        "from milepost.components import RewardTraits\n"
        "@milepost.hookimpl\n"
        "def milepost_rewards():\n"
        "    return [milepost.Component('mine', milepost.NoOptions, RewardTraits(), lambda _: None, 'Mine.')]\n"
    )
    datasets = [{"name": "heldout", "path": "heldout.jsonl", "reward": {"name": "mine"}}]
    path = write_config(
        plugins={"modules": ["in_house"]},
        eval={"datasets": datasets},
        algorithm={"eps_clip": 0.3},
        advantage={"normalize_std": False},
    )
    loaded = load_config([path])
    registry.use(loaded.registry)
    yield make_plan(loaded)
    registry.use(None)


def test_a_plan_arrives_as_it_was(plan: Plan) -> None:
    message = pickle.loads(pickle.dumps(PlanMessage.of(plan)))
    registry.use(None)  # as in a new process
    there = message.restore("trainer-0")
    for name in ("algorithm", "advantage", "reward", "model", "transport"):
        mine, theirs = getattr(plan, name), getattr(there, name)
        assert (theirs.name, theirs.options.model_dump(), theirs.distribution) == (
            mine.name,
            mine.options.model_dump(),
            mine.distribution,
        )
    assert there.algorithm.options.eps_clip == 0.3
    assert there.eval_rewards["heldout"].name == "mine"
    same = {name: getattr(plan, name) for name in ("algorithm", "advantage", "reward", "model", "transport")}
    assert replace(there, eval_rewards=plan.eval_rewards, **same) == plan
    assert registry.current().names("reward") and "mine" in registry.current().names("reward")


def test_other_plugins_than_the_controllers_are_refused_with_every_difference(plan: Plan) -> None:
    message = PlanMessage.of(plan)
    theirs = {**message.distributions, "milepost": "9.9", "only-there": "1.0"}
    expected = (
        r"the plugins of trainer-3 are not the controller's.*"
        r"milepost: 9\.9 there, 0\.\S+ here.*only-there: 1\.0 there, absent here"
    )
    with pytest.raises(PluginError, match=f"(?s){expected}"):
        replace(message, distributions=theirs).restore("trainer-3")


@pytest.mark.parametrize(
    "error",
    [CheckpointError("it does not fit"), ConfigError([Problem("a.b", "is wrong", "run.yaml:3"), Problem("c", "too")])],
)
def test_milepost_errors_come_back_as_they_were(error: MilepostError) -> None:
    back = pickle.loads(pickle.dumps(Failure.of(error))).error("trainer-0")
    assert type(back) is type(error)
    assert (str(back), back.exit_code) == (str(error), error.exit_code)


def test_other_exceptions_name_their_process() -> None:
    back = Failure.of(ZeroDivisionError("division by zero")).error("engine-1")
    assert isinstance(back, WorkerError)
    assert str(back) == "engine-1 failed with ZeroDivisionError: division by zero"


def test_no_exception_that_only_bears_a_name_of_ours_is_taken_for_one() -> None:
    class Problem(Exception):  # noqa: N818  milepost.errors has something of this name that is no exception
        pass

    assert isinstance(Failure.of(Problem(os.curdir)).error("trainer-0"), WorkerError)
