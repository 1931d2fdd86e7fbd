"""A run with `mix`: each part's own curve, routing by the dataset's metadata, and what planning refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from milepost import loop
from milepost.config.loading import load_config
from milepost.config.plan import make_plan
from milepost.errors import ConfigError
from milepost.registry import use
from runs import lines


def mixed(config: Path, parts: dict[str, Any], **more: Any) -> Path:
    """Put a mix in the place of the config's reward, and give every second prompt another kind."""
    text = config.read_text().replace("  function: score:score\n", "").replace("name: python", "name: mix")
    config.write_text(
        text.replace(
            "reward:\n",
            f"reward:\n  parts: {json.dumps(parts)}\n"
            + "".join(f"  {key}: {json.dumps(value)}\n" for key, value in more.items()),
        )
    )
    data = config.parent / "train.jsonl"
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    rows = [{**row, "metadata": {"kind": ("sum", "other")[index % 2]}} for index, row in enumerate(rows)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return config


def test_each_part_has_a_curve_of_its_own(write_config: Callable[..., Path]) -> None:
    parts = {
        "digits": {"name": "python", "options": {"function": "score:score"}, "weight": 2.0},
        "boxed": {"name": "format", "options": {"pattern": "."}, "weight": 0.5, "only": ["sum"]},
        "no_box": {"name": "format", "options": {"pattern": "."}, "weight": -0.5, "only": ["other"]},
    }
    config = mixed(write_config(rollout={"num_rollouts": 2}, eval={"datasets": []}), parts, route="kind")
    loaded = load_config([config])
    use(loaded.registry)
    try:
        run_dir = loop.train(make_plan(loaded), progress=False).run_dir
    finally:
        use(None)
    rollouts = lines(run_dir, "rollout")
    assert len(rollouts) == 2
    for line in rollouts:
        assert 0 < line["rollout/reward/digits"] < 1
        curves = {name for name in line if name.startswith("rollout/reward/")}
        assert curves <= {"rollout/reward/digits", "rollout/reward/boxed", "rollout/reward/no_box"} and len(curves) >= 2
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        rewards = sample["rewards"]
        expected = 2.0 * rewards["digits"] + 0.5 * rewards.get("boxed", 0.0) - 0.5 * rewards.get("no_box", 0.0)
        assert rewards["reward"] == pytest.approx(expected)


def test_parts_that_do_not_exist_are_refused_while_planning(write_config: Callable[..., Path]) -> None:
    config = mixed(write_config(), {"right": {"name": "deepscalr"}})
    loaded = load_config([config])
    use(loaded.registry)
    try:
        with pytest.raises(ConfigError, match=r"parts\.right: unknown reward 'deepscalr'"):
            make_plan(loaded)
    finally:
        use(None)
