from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from milepost.config.estimates import estimate
from milepost.config.loading import load_config
from milepost.config.plan import Plan, make_plan
from milepost.config.render import binary, config_data, config_lines, flow, plan_data, plan_text, quantity


def plan(*sets: str) -> Plan:
    return make_plan(load_config("run.yaml", sets))


@pytest.mark.parametrize(
    "value",
    [
        *("a", "on", "No", "1e-6", "a: b", "#x", "", " a", "1", "~/x", "/abs/path.jsonl", "!x", "null", "é\n", "x-y_z"),
        *(1e-6, 0.1, 1, True, None, [1, "on"], {"a": "off"}, [], {}),
    ],
)
def test_flow_reads_back_as_the_same_value(tmp_path: Path, value: Any) -> None:
    text = flow(value)
    assert "\n" not in text
    # Both by milepost's rules and by those of YAML 1.1.
    assert yaml.safe_load(text) == value
    (tmp_path / "a.yaml").write_text(f"engine: {{options: {{x: {text}}}}}")
    from milepost.config.documents import read_file

    node = read_file(tmp_path / "a.yaml", "a.yaml", lambda problem: pytest.fail(str(problem)))
    assert node is not None
    assert node.plain() == {"engine": {"options": {"x": value}}}


def test_shown_config_is_the_same_config(project: Path) -> None:
    sets = ["eval.datasets=[{name: a, path: b}, {name: c, path: d, label: {key: k, regex: '#### (.*)'}}]"]
    loaded = load_config("run.yaml", [*sets, "engine.options={mem: 0.8, mode: on}", "rollout.stop=['\\n', on]"])
    text = "\n".join(config_lines(loaded.config, loaded.origins))
    (project / "shown.yaml").write_text(text)
    again = load_config("shown.yaml")
    assert config_data(again.config) == config_data(loaded.config)
    lines = text.splitlines()
    line = next(number for number, line in enumerate(lines, 1) if "batch_size: 8" in line)
    assert lines[line - 1].endswith("# run.yaml:5")
    assert again.origins["rollout.batch_size"] == f"shown.yaml:{line}"


def test_estimates_by_hand(project: Path) -> None:
    cost = estimate(plan())
    # A million parameters in float32: weights, gradients, two moments; 6 x parameters x tokens of arithmetic.
    assert (cost.dtype, cost.weights, cost.gradients, cost.optimizer) == ("float32", 4_000_000, 4_000_000, 8_000_000)
    assert math.isclose(cost.flops_per_sample, 6e6 * 1024)
    assert math.isclose(cost.flops_per_rollout, 6e6 * 1024 * 32)
    cost = estimate(plan("model.dtype=bfloat16", "algorithm.name=toy_critic", "algorithm.kl_loss_coef=1"))
    assert (cost.weights, cost.gradients, cost.optimizer) == (2_000_000, 2_000_000, 12_000_000)
    assert (cost.trained_roles, cost.frozen_roles, cost.engine_weights) == (2, 1, 2_000_000)
    assert estimate(plan("optimizer.name=sgd")).optimizer == 0


def test_plan_as_text(project: Path) -> None:
    text = plan_text(plan("algorithm.name=toy_critic", "rollout.num_rollouts=3", "eval.interval=2"))
    rows = {line.split("  ")[0]: " ".join(line.split("  ")[1:]).strip() for line in text.splitlines() if "  " in line}
    assert rows["run folder"] == str(project / "runs" / "run")
    assert rows["batch"] == "8 prompts x 4 samples = 32 rollouts a step x 1 step"
    assert rows["length"] == "3 rollouts, 3 optimizer steps"
    assert rows["roles"] == "actor, critic"
    assert rows["placement"] == "1 training rank (1 data-parallel), 1 engine on the same devices, inline"
    assert rows["model"] == "1M parameters, 2 layers of 64, vocabulary 100"
    assert rows["advantage"].startswith("toy_gae, from local:toy_parts.py")
    assert rows["memory"].startswith("about 30.5 MiB a rank in float32: weights 3.81 MiB")
    assert text.splitlines()[-1] == "warning: eval.interval: has no effect: eval.datasets is empty (--set)"


def test_plan_as_data(project: Path) -> None:
    made = plan()
    data = json.loads(json.dumps(plan_data(made)))
    assert data["derived"]["global_batch_size"] == 32
    assert data["config"]["trainer"]["global_batch_size"] == 32
    assert data["origins"]["trainer.global_batch_size"] == "derived"
    assert data["components"]["reward"]["name"] == "toy_match"
    assert data["layout"]["num_parameters"] == 1_000_000


def test_units() -> None:
    assert [quantity(x) for x in (5, 1500, 2.5e9, 3e15)] == ["5", "1.5k", "2.5G", "3P"]
    assert quantity(4.02e9, giga="B") == "4.02B"
    assert [binary(x) for x in (5, 1536, 2**30, 2**42)] == ["5 B", "1.5 KiB", "1 GiB", "4 TiB"]
