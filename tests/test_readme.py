"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import yaml
from milepost import PluginError
from milepost.config.schema import RunConfig
from milepost.registry import Registry, use
from milepost.samples import Sample, Task

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def sample(text: str, label: str) -> Sample:
    empty = np.zeros(0)
    return Sample(
        task=Task(index=0, prompt="", tokens=(), label=label),
        tokens=empty.astype(np.int32),
        trainable=empty.astype(np.bool_),
        log_probs=empty.astype(np.float32),
        versions=empty.astype(np.int32),
        text=text,
    )


def test_plugin_has_15_lines_and_scores(tmp_path: Path) -> None:
    (plugin,) = blocks("python")
    assert sum(bool(line.strip()) for line in plugin.splitlines()) == 15
    (tmp_path / "brief.py").write_text(plugin, encoding="utf-8")
    sections = yaml.safe_load(blocks("yaml")[0])
    registry = Registry.load(modules=sections["plugins"]["modules"], base_dir=tmp_path)
    name = sections["reward"].pop("name")
    try:
        use(registry)
        reward = registry.resolve("reward", name, sections["reward"])
        assert reward.score(sample(r"<think>15 8</think>\boxed{85}", "85")) == 1  # 11 characters of at most 12
        assert reward.score(sample(r"<think>15 7</think>\boxed{75}", "85")) == 0
        assert reward.score(sample(r"<think>5+8=13, 1+8=9</think>\boxed{85}", "85")) == 0
        with pytest.raises(PluginError, match="limit"):
            registry.resolve("reward", name, {"limits": 12})
    finally:
        use(None)


def test_entry_point_is_the_group_that_is_searched() -> None:
    (toml,) = blocks("toml")
    assert toml.splitlines()[0] in (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()


def test_run_config_lines_name_fields_that_exist() -> None:
    for block in blocks("yaml")[1:]:
        for section, values in yaml.safe_load(block).items():
            model = RunConfig.model_fields[section].annotation
            assert isinstance(model, type)
            model.model_validate({"path": "x", **values} if section == "data" else values)


def test_make_targets_exist() -> None:
    for target in sorted(set(re.findall(r"make (quickstart|test|help)\b", README))):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", ["README.md", "docs/index.md", "docs/concepts.md", "docs/plugins.md"])
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", path.read_text(encoding="utf-8"))
    assert links
    for link in links:
        assert (path.parent / link).exists(), f"{page} links to {link}, which is not there"
