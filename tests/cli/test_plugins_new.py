"""`milepost plugins new`: what it writes passes its own tests and the conformance kit as it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command
from milepost.errors import PluginError
from milepost.registry import Registry
from milepost.scaffold import new_plugin
from milepost.scaffold.shapes import layout_values
from milepost.testing.checkpoints import config_of

pytestmark = pytest.mark.takes(30)


def forked(module: str, *arguments: str | Path, cwd: Path) -> str:
    """Run a module to its good end and return its output."""
    code, output = Command(*arguments, cwd=cwd, module=module).finish()
    assert code == 0, output
    return output


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    words = [sys.executable, *map(str, command)]
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd, env=environment)


def milepost(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run("-c", "from milepost.cli import main; main()", "plugins", *arguments, cwd=cwd)


def write_config(folder: Path, architecture: str) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config_of(architecture)))
    return path


@pytest.mark.parametrize("kind", ["reward", "algorithm", "advantage", "transport", "model"])
def test_what_is_written_passes_as_it_is(kind: str, tmp_path: Path) -> None:
    more = ["--config", write_config(tmp_path, "Olmo2ForCausalLM")] if kind == "model" else []
    made = forked("milepost", "plugins", "new", kind, f"acme-{kind}", *more, cwd=tmp_path)
    assert made.endswith(f"next:\n  cd acme-{kind}\n  milepost plugins check .\n  pip install -e .\n")
    project = tmp_path / f"acme-{kind}"
    forked("pytest", "-q", "-p", "no:cacheprovider", cwd=project)
    plugin, component, last = forked("milepost", "plugins", "check", ".", cwd=project).splitlines()
    assert plugin == f"plugin acme_{kind} from acme-{kind} 0.1.0: ok"
    assert component == f"{kind} acme_{kind} from acme-{kind} 0.1.0: ok"
    assert last == "every promise is kept"


def test_an_installed_one_is_found_and_used_by_name(tmp_path: Path) -> None:
    assert milepost("new", "reward", "acme-words", "--out", "made", cwd=tmp_path).returncode == 0
    site = tmp_path / "site"
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    done = run(*install, "--target", site, tmp_path / "made", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    code = (
        f"import sys; sys.path.insert(0, {str(site)!r})\n"
        "from milepost.registry import current\n"
        "print(current().get('reward', 'acme_words').origin)"
    )
    assert run("-c", code, cwd=tmp_path).stdout == "acme-words 0.1.0\n"


@pytest.mark.parametrize(
    ("kind", "name", "config", "message"),
    [
        ("reward", "2fast", None, "'2fast' cannot be the name of a distribution and a module"),
        ("reward", "class", None, "'class' cannot be the name"),
        ("algorithm", "grpo", None, "there is an algorithm 'grpo' already, from milepost"),
        ("reward", "json", None, "there is a module 'json' already"),
        ("model", "mine", None, "a model recipe is made from a checkpoint's config.json; give it with --config PATH"),
        ("reward", "mine", "Olmo2ForCausalLM", "a reward has no config; leave --config out"),
        ("model", "mine", "Qwen3ForCausalLM", "--block milepost:qwen3"),
    ],
)
def test_what_cannot_be_written_says_why(
    kind: str, name: str, config: str | None, message: str, tmp_path: Path
) -> None:
    path = write_config(tmp_path, config) if config else None
    with pytest.raises(PluginError) as error:
        new_plugin(kind, name, tmp_path / "out", registry=Registry.load(), config=path)  # type: ignore[arg-type]
    assert message in str(error.value)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(PluginError, match="is not an empty folder"):
        new_plugin("reward", "acme-words", tmp_path, registry=Registry.load())
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "architecture", ["GPT2LMHeadModel", "Phi3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen2ForCausalLM"]
)
def test_the_layout_of_a_family_counts_every_parameter(architecture: str, tmp_path: Path) -> None:
    registry = Registry.load(block=["qwen2", "qwen3_moe"])
    path = write_config(tmp_path, architecture)
    new_plugin("model", "acme-model", tmp_path / "out", registry=registry, config=path)
    forked("pytest", "-q", "-k", "size", "-p", "no:cacheprovider", cwd=tmp_path / "out")


def test_shapes_that_are_not_understood_are_named() -> None:
    with pytest.raises(PluginError, match=r"tensor .* has the shape .* a recipe for this model is written by hand"):
        layout_values(config_of("DeepseekV3ForCausalLM"))
