"""Bad run configs of every kind: one clear message each; a small share of what scripts/robustness/configs.py checks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from milepost.config.loading import load_config
from milepost.config.plan import make_plan
from milepost.errors import ConfigError, Problem

SCRIPT = Path(__file__).parents[2] / "scripts" / "robustness" / "configs.py"

GOOD = """\
model: {path: model}
data: {path: train.jsonl}
rollout: {num_rollouts: 10, batch_size: 8, samples_per_prompt: 4}
reward: {name: deepscaler}
"""
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)


def test_mutations_of_the_examples_get_one_message_each() -> None:
    command = [sys.executable, str(SCRIPT), "--count", "66", "--subprocesses", "2", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "MISS" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("66 of ")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    (tmp_path / "train.jsonl").write_text('{"prompt": "1?", "label": "1"}\n')
    return tmp_path


def problems(project: Path, text: str) -> tuple[Problem, ...]:
    (project / "good.yaml").write_text(GOOD)
    (project / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        make_plan(load_config([project / "good.yaml", project / "bad.yaml"]))
    return caught.value.problems


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("track: " + "[" * 150 + "]" * 150, "", "nested deeper than 100 levels"),
        ("track: " + "[" * 5000 + "]" * 5000, "", "nested deeper than 100 levels"),
        ("track: " + "{a: " * 5000 + "1" + "}" * 5000, "", "nested deeper than 100 levels"),
        (LAUGHS, "", "more than 100000 values"),
        ("track: {tensorboard: !mine 3}", "track.tensorboard", "could not determine a constructor for the tag"),
        ("algorithm: {dual_clip: true}", "algorithm.dual_clip", "expected a number, got true or false"),
        ("run: {seed: 9223372036854775808}", "run.seed", "must be less than 9223372036854775808"),
        ("reward: {name: python, function: score}", "reward.function", "expected text that matches ^[A-Za-z_]"),
        ("optimizer: {betas: true}", "optimizer.betas", "expected a list, got true"),
    ],
)
def test_one_problem_is_reported_once(project: Path, text: str, path: str, message: str) -> None:
    (problem,) = problems(project, text)
    assert problem.path == path
    assert message in problem.message
    assert "bad.yaml" in problem.origin


@pytest.mark.parametrize("path", ["model.path", "data.path", "reference.path", "critic.init_from"])
def test_a_name_that_no_file_can_have_is_a_problem_like_another(project: Path, path: str) -> None:
    section, _, key = path.partition(".")
    found = problems(project, f"{section}: {{{key}: {'x' * 5000}}}")
    (message,) = [problem.message for problem in found if problem.path == path]
    assert "which cannot be looked up: File name too long" in message
    assert len(message) < 300
