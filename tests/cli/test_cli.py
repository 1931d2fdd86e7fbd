from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from milepost import __version__, registry
from milepost.cli import COMMANDS, INTERRUPTED, LazyGroup, cli
from milepost.errors import RunError

TOY = Path(__file__).parents[1] / "config" / "toy_parts.py"

GOOD = """\
model: {path: model}
data: {path: train.jsonl}
rollout: {num_rollouts: 10, batch_size: 8, samples_per_prompt: 4}
reward: {name: toy_match}
algorithm: {name: toy}
transport: {name: toy_near}
plugins: {modules: [toy_parts]}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with everything a plan needs, the working directory of the test."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(TOY, tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["ToyForCausalLM"], "hidden_size": 64}')
    (tmp_path / "train.jsonl").write_text('{"prompt": "1?", "label": "1"}\n')
    (tmp_path / "good.yaml").write_text(GOOD)
    yield tmp_path
    registry.use(None)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), prog_name="milepost")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the console script's own entry in a process of its own."""
    program = "from milepost.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


# Each is laid over the good run config; expected are the path of the one problem, its line, and part of the message.
BAD = [
    # Unknown keys, at every level.
    ("modle: {path: x}", "modle", 1, "unknown section; did you mean 'model'?"),
    ("wandb: {project: x}", "wandb", 1, "unknown section here; did you mean track.wandb?"),
    ("model: {pth: x}", "model.pth", 1, "did you mean 'path'?"),
    ("rollout:\n  tempreature: 1", "rollout.tempreature", 2, "did you mean 'temperature'?"),
    ("rollout: {lr: 1}", "rollout.lr", 1, "did you mean critic.lr or optimizer.lr?"),
    ("trainer: {frobnicate: 1}", "trainer.frobnicate", 1, "unknown key; known here: backend, context_parallel"),
    ("data: {label: {key: a, regx: b}}", "data.label.regx", 1, "did you mean 'regex'?"),
    ("track: {wandb: {project: a, entty: b}}", "track.wandb.entty", 1, "did you mean 'entity'?"),
    ("algorithm: {eps_clp: 0.1}", "algorithm.eps_clp", 1, "did you mean 'eps_clip'? (options of algorithm 'toy')"),
    ("algorithm: {kl_loss_coeff: 1}", "algorithm.kl_loss_coeff", 1, "did you mean 'kl_loss_coef'?"),
    ("advantage: {normalise_std: false}", "advantage.normalise_std", 1, "did you mean 'normalize_std'?"),
    ("reward: {timeuot: 3}", "reward.timeuot", 1, "did you mean 'timeout'?"),
    ("transport: {verfy: true}", "transport.verfy", 1, "did you mean 'verify'?"),
    ("algorithm:\n  correction:\n    name: tis\n    hi: 3", "algorithm.correction.hi", 4, "did you mean 'high'?"),
    ("eval:\n  datasets:\n    - name: a\n      path: b\n      limt: 3", "eval.datasets.0.limt", 5, "'limit'?"),
    # Wrong types.
    ("optimizer: {lr: fast}", "optimizer.lr", 1, "expected a number, got 'fast'"),
    ("optimizer: {lr: 1e-}", "optimizer.lr", 1, "expected a number, got '1e-'"),
    ("rollout: {batch_size: 8.5}", "rollout.batch_size", 1, "expected a whole number, got 8.5"),
    ("rollout: {batch_size: true}", "rollout.batch_size", 1, "expected a number, got true or false"),
    ("rollout: {stop: end}", "rollout.stop", 1, "expected a list, got 'end'"),
    ("rollout: {stop: [1]}", "rollout.stop.0", 1, "expected text, got 1"),
    ("data: {shuffle: maybe}", "data.shuffle", 1, "expected true or false, got 'maybe'"),
    ("data: {path: 3}", "data.path", 1, "expected text, or a mapping, or a list, got 3"),
    ("data: {label: 3}", "data.label", 1, "expected text, or a mapping, got 3"),
    ("data: {chat_template_args: 3}", "data.chat_template_args", 1, "expected a mapping, got 3"),
    ("model: here", "model", 1, "expected a mapping with keys such as path, recipe, dtype, got 'here'"),
    ("eval: {datasets: {name: a, path: b}}", "eval.datasets", 1, "expected a list, got a mapping with name, path"),
    ("optimizer: {betas: [0.9]}", "optimizer.betas", 1, "expected more elements than 1"),
    ("optimizer: {betas: [0.9, 0.9, 0.9]}", "optimizer.betas", 1, "expected at most 2 elements"),
    ("algorithm: {eps_clip: wide}", "algorithm.eps_clip", 1, "expected a number, got 'wide'"),
    # Out of range.
    ("rollout: {batch_size: 0}", "rollout.batch_size", 1, "must be greater than 0, got 0"),
    ("run: {seed: -1}", "run.seed", 1, "must be at least 0, got -1"),
    ("optimizer: {betas: [0.9, 1.5]}", "optimizer.betas.1", 1, "must be at most 1, got 1.5"),
    ("optimizer: {lr: .inf}", "optimizer.lr", 1, "expected a finite number, got inf"),
    ("algorithm: {eps_clip: -1}", "algorithm.eps_clip", 1, "must be greater than 0, got -1"),
    ("rollout: {stop: ['']}", "rollout.stop.0", 1, "expected text of at least 1 character, got ''"),
    # Names of which there are only some.
    ("trainer: {backend: megatorn}", "trainer.backend", 1, "did you mean 'megatron'?"),
    ("algorithm: {mode: sooft}", "algorithm.mode", 1, "expected 'hard' or 'soft', got 'sooft'; did you mean 'soft'?"),
    ("algorithm: {aggregation: tokenmean}", "algorithm.aggregation", 1, "did you mean 'token_mean'?"),
    ("algorithm: {name: toyy}", "algorithm.name", 1, "did you mean 'toy'?"),
    ("advantage: {name: toy_gruop}", "advantage.name", 1, "did you mean 'toy_group'?"),
    ("reward: {name: toy_macth}", "reward.name", 1, "did you mean 'toy_match'?"),
    ("transport: {name: toy_naer}", "transport.name", 1, "did you mean 'toy_near'?"),
    ("model: {recipe: toy_modle}", "model.recipe", 1, "did you mean 'toy_model'?"),
    # Missing.
    ("eval: {datasets: [{path: train.jsonl}]}", "eval.datasets.0.name", 1, "required, but not given"),
    ("track: {wandb: {}}", "track.wandb.project", 1, "required, but not given: Project name"),
    ("reward: {name: toy_function}", "reward.function", 1, "required, but not given: `module:name`"),
    # Files.
    ("model: {path: nowhere}", "model.path", 1, "/nowhere does not exist"),
    ("model: {path: train.jsonl}", "model.path", 1, "/train.jsonl is not that"),
    ("model: {path: .}", "model.path", 1, "there is no config.json in"),
    ("data: {path: nowhere.jsonl}", "data.path", 1, "/nowhere.jsonl does not exist"),
    ("data: {path: model}", "data.path", 1, "/model is not that"),
    ("eval:\n  datasets:\n  - {name: a, path: nowhere}", "eval.datasets.0.path", 3, "/nowhere does not exist"),
    ("reference: {path: nowhere}", "reference.path", 1, "/nowhere does not exist"),
    ("critic: {init_from: nowhere}", "critic.init_from", 1, "/nowhere does not exist"),
    ("checkpoint: {init_from: nowhere}", "checkpoint.init_from", 1, "expected a checkpoint folder"),
    # YAML itself.
    ("rollout: {seed: 1, seed: 2}", "rollout.seed", 1, "given twice in one file"),
    ("rollout: {1: 2}", "rollout", 1, "a key must be text, got 1"),
    ("rollout: [1, 2", "", 2, "(it begins on line 1)"),
    ("- rollout", "", 1, "got a list"),
    ("data: {label: {key: a, regex: '('}}", "data.label.regex", 1, "does not compile"),
    # Rules between values.
    ("trainer: {global_batch_size: 5}", "trainer.global_batch_size", 1, "32 = 6 x 5 + 2"),
    ("rollout: {top_p: 0.9}", "rollout.top_p", 1, "leave it at 1.0"),
]


@pytest.mark.parametrize(("text", "path", "line", "message"), BAD, ids=[text.replace("\n", " ") for text, *_ in BAD])
def test_bad_configs(project: Path, text: str, path: str, line: int, message: str) -> None:
    (project / "bad.yaml").write_text(text + "\n")
    result = invoke("plan", "good.yaml", "bad.yaml")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert "pydantic" not in result.stderr
    found = [entry for entry in result.stderr.splitlines() if message in entry]
    assert len(found) == 1, result.stderr
    assert found[0].startswith(f"  {path}: " if path else "  ")
    assert f"bad.yaml:{line}" in found[0]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (("optimizer.lr",), "expected KEY=VALUE such as optimizer.lr=2e-6, got 'optimizer.lr' (--set)"),
        (("optimizer.lrr=1",), "optimizer.lrr: unknown key; did you mean 'lr'? (--set)"),
        (("optimizer.lr=[1",), "optimizer.lr: the value '[1' is not valid YAML"),
        (("eval.datasets.0.limit=1",), "eval.datasets: expected a list, got a mapping with 0 (--set)"),
        (("rollout.batch_size=-1", "run.seed=x"), "2 problems in the run config"),
    ],
)
def test_bad_sets(project: Path, sets: tuple[str, ...], message: str) -> None:
    result = invoke("plan", "good.yaml", *(argument for text in sets for argument in ("--set", text)))
    assert result.exit_code == 2
    assert message in result.stderr


def test_missing_sections_say_what_they_are_for(project: Path) -> None:
    (project / "empty.yaml").write_text("")
    result = invoke("plan", "empty.yaml")
    assert result.exit_code == 2
    for path in ("model.path", "data.path", "reward.name"):
        assert f"  {path}: required, but not given: " in result.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere.yaml", "run config nowhere.yaml does not exist; looked for /"),
        ("model", "run config model is a folder"),
    ],
)
def test_unreadable_files(project: Path, name: str, message: str) -> None:
    result = invoke("plan", "good.yaml", name)
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_broken_plugin_shows_its_traceback_below_the_problem(project: Path) -> None:
    (project / "shaky.py").write_text("import nothing_of_this_name\n")
    (project / "bad.yaml").write_text("reward: {name: shaky}\nplugins: {modules: [toy_parts, shaky]}\n")
    result = invoke("plan", "good.yaml", "bad.yaml")
    assert result.exit_code == 2
    lines = result.stderr.splitlines()
    assert lines[0] == "error: 1 problem in the run config"
    assert lines[1].startswith("  reward.name: ")
    assert lines[1].endswith("(bad.yaml:1)")
    assert "No module named 'nothing_of_this_name'" in lines[-1]
    assert all(line.startswith("      ") for line in lines[2:])


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_lists_the_commands(flag: str) -> None:
    result = invoke(flag)
    assert result.exit_code == 0
    for name, (_, summary) in COMMANDS.items():
        assert re.search(rf"{name}\s+{re.escape(summary)}", result.stdout)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_that_begins_with_its_summary(name: str) -> None:
    result = invoke(name, "--help")
    assert result.exit_code == 0
    summary = COMMANDS[name][1].rstrip(".").split(",")[0]
    assert summary in " ".join(result.stdout.split())


def test_version() -> None:
    assert invoke("--version").stdout == f"milepost, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trian",), "no command 'trian'; did you mean 'train'?"),
        (("frobnicate",), "no command 'frobnicate'; there are train, "),
        (("plan", "--jsn", "good.yaml"), "--json"),
        (("plan",), "Missing argument 'CONFIG...'"),
        (("train", "good.yaml", "--resume", "maybe"), "'maybe' is not one of 'auto', 'must', 'never'"),
        (("--frob",), "--frob"),
    ],
)
def test_usage_errors(project: Path, arguments: tuple[str, ...], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_plan_shows_values_with_origins(project: Path) -> None:
    result = invoke("plan", "good.yaml", "--set", "optimizer.lr=2e-6", "--run-dir", "out")
    assert result.exit_code == 0, result.stderr
    shown = {line.split(":")[0].strip(): line for line in result.stdout.splitlines() if "#" in line}
    assert shown["batch_size"].split() == ["batch_size:", "8", "#", "good.yaml:3"]
    assert shown["global_batch_size"].split() == ["global_batch_size:", "32", "#", "derived"]
    assert shown["dir"].split() == ["dir:", str(project / "out"), "#", "--run-dir"]
    assert "lr: 2.0e-06" in result.stdout
    assert sorted(path.name for path in project.iterdir() if path.suffix != ".pyc") == sorted(
        {"good.yaml", "model", "toy_parts.py", "train.jsonl"} | {p.name for p in project.glob("__pycache__")}
    )


def test_plan_as_json(project: Path) -> None:
    result = invoke("plan", "good.yaml", "--json")
    data = json.loads(result.stdout)
    assert data["derived"]["num_steps"] == 10
    assert data["origins"]["rollout.num_rollouts"] == "good.yaml:3"


def test_config_show_and_schema(project: Path) -> None:
    result = invoke("config", "show", "good.yaml", "--set", "optimizer.lr=3e-6")
    assert result.exit_code == 0
    (project / "shown.yaml").write_text(result.stdout)
    shown = json.loads(invoke("config", "show", "shown.yaml", "--json").stdout)
    assert shown["config"]["optimizer"]["lr"] == 3e-6
    assert shown["origins"]["rollout.batch_size"].startswith("shown.yaml:")
    schema = json.loads(invoke("config", "schema").stdout)
    assert "rollout" in schema["properties"]


def failing(error: BaseException) -> LazyGroup:
    """Return the root command with one command that raises, where `plan` would be found."""

    class Root(LazyGroup):
        def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
            def fail() -> None:
                raise error

            return click.Command(cmd_name, callback=fail)

    return Root("milepost", params=cli.params, callback=cli.callback)


def test_exit_code_is_the_errors_own() -> None:
    result = CliRunner().invoke(failing(RunError("rewards failed\nthroughout")), ["plan"])
    assert result.exit_code == 1
    assert result.stderr == "error: rewards failed\n  throughout\n"


def test_interrupt_exits_as_shells_have_it() -> None:
    result = CliRunner().invoke(failing(KeyboardInterrupt()), ["plan"])
    assert (result.exit_code, result.stderr) == (INTERRUPTED, "interrupted\n")


def test_what_milepost_does_not_raise_on_purpose_is_not_hidden() -> None:
    result = CliRunner().invoke(failing(ZeroDivisionError("a bug")), ["plan"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_process_exits_with_two_and_without_traceback(project: Path) -> None:
    done = run("train", "good.yaml", "--set", "data.path=nowhere.jsonl")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: 1 problem in the run config\n  data.path: 'nowhere.jsonl' was given")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("arguments", "environment"), [(("--debug",), {}), ((), {"MILEPOST_DEBUG": "1"})])
def test_debugging_shows_the_traceback(project: Path, arguments: tuple[str, ...], environment: dict[str, str]) -> None:
    done = run(*arguments, "plan", "good.yaml", "--set", "data.path=nowhere.jsonl", **environment)
    assert done.returncode != 0
    assert "Traceback" in done.stderr
    assert "ConfigError: 1 problem" in done.stderr


def test_reader_that_goes_away_is_no_error(project: Path) -> None:
    command = f"{sys.executable} -c 'from milepost.cli import main; main()' config schema | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_help_imports_only_what_it_needs() -> None:
    program = (
        "import sys; from milepost.cli import cli; cli(['--help'], standalone_mode=False); "
        "print(sorted(m for m in ('torch', 'numpy', 'yaml', 'milepost.config.schema', 'milepost.loop') "
        "if m in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
