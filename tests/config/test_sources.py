"""Data sources of a run config: how they are read, found, refused and counted while planning."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import datasets
import pytest
from milepost.config.loading import load_config
from milepost.config.plan import Plan, make_plan
from milepost.config.schema import DataSource
from milepost.config.sources import Source, epoch_bounds, hub_name, read_sources
from milepost.errors import ConfigError


def plan(*sets: str) -> Plan:
    return make_plan(load_config("run.yaml", sets))


def problems(*sets: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        plan(*sets)
    return {problem.path: problem.message for problem in caught.value.problems}


def fetched(cache: Path, kind: str, name: str) -> Path:
    """An empty snapshot of a name, laid out as huggingface_hub does."""
    folder = cache / f"{kind}s--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc123")
    (folder / "snapshots" / "abc123").mkdir(parents=True)
    return folder / "snapshots" / "abc123"


def test_texts_and_mappings_are_read_alike() -> None:
    assert read_sources("a.jsonl") == [Source("a.jsonl")]
    assert read_sources(("a@b.jsonl@[2:]", DataSource(path="o/n@[:-1]", weight=0.1, split="test", subset="main"))) == [
        Source("a@b.jsonl", 2, None),
        Source("o/n", None, -1, "test", "main", Fraction(1, 10)),
    ]
    assert [source.text for source in read_sources(("a@[1:2]", "b@[:]"))] == ["a@[1:2]", "b"]


def test_names_on_the_hub_and_paths() -> None:
    assert [
        text for text in ("openai/gsm8k", "a/b.c-d", "../x", "a/b/c", "x", "d/a.jsonl", "~/x") if hub_name(text)
    ] == [
        "openai/gsm8k",
        "a/b.c-d",
    ]


def test_epochs_cut_an_endless_sequence_of_passes() -> None:
    assert [list(epoch_bounds(4, Fraction(1), epoch)) for epoch in (0, 1)] == [[(0, 0, 4)], [(1, 0, 4)]]
    assert list(epoch_bounds(4, Fraction(5, 2), 0)) == [(0, 0, 4), (1, 0, 4), (2, 0, 2)]
    assert list(epoch_bounds(4, Fraction(5, 2), 1)) == [(2, 2, 4), (3, 0, 4), (4, 0, 4)]
    assert [list(epoch_bounds(3, Fraction(1, 10), epoch)) for epoch in (2, 3)] == [[], [(0, 0, 1)]]


def test_places_become_absolute_and_keep_slices_and_weights(project: Path) -> None:
    made = plan("data.path=['train.jsonl@[:5]', {path: './train.jsonl@[5:]', weight: 2}]")
    first, second = made.config.data.path
    assert first == f"{project}/train.jsonl@[:5]"
    assert second == DataSource(path=f"{project}/train.jsonl@[5:]", weight=2)
    assert made.origins["data.path.1.weight"] == "--set"


def test_epochs_count_every_form_of_data(project: Path) -> None:
    datasets.Dataset.from_list([{"prompt": "x", "label": "y"}] * 6).save_to_disk(project / "saved")
    datasets.Dataset.from_list([{"prompt": "x", "label": "y"}] * 4).to_parquet(project / "four.parquet")
    epochs = ("rollout.num_rollouts=null", "rollout.num_epochs=2")
    cases = {
        "train.jsonl@[:-4]": 4,  # 2 x 16 prompts, 8 a rollout
        "saved": 2,  # 12
        "four.parquet": 1,  # 8
        "['train.jsonl@[:8]', {path: saved, weight: 0.5}, {path: four.parquet, weight: 3}]": 6,  # 16 + 6 + 24 = 46
    }
    for path, rollouts in cases.items():
        assert plan(*epochs, f"data.path={path}").num_rollouts == rollouts
    found = problems(*epochs, "rollout.num_rollouts=9", "data.path={path: four.parquet, weight: 3}")
    assert "2 epochs of 4 rows (weighted) at 8 prompts a rollout are 3 rollouts" in found["rollout.num_epochs"]
    assert problems(*epochs, "data.path=train.jsonl@[99:]") == {
        "data.path": "train.jsonl@[99:] is empty; expected at least one row"
    }
    (project / "bad.parquet").write_text("x")
    assert "is no parquet file" in problems(*epochs, "data.path=bad.parquet")["data.path"]


def test_sources_that_are_not_there(project: Path) -> None:
    found = problems("data.path=[train.jsonl, nowhere.parquet]", "eval.datasets=[{name: a, path: openai/gsm8k}]")
    assert found["data.path.1"].endswith(f"{project}/nowhere.parquet does not exist")
    assert found["eval.datasets.0.path"].endswith("fetch it with: milepost prepare RUN.yaml")
    assert "expected FILE@[a:b]" in problems("data.path=train.jsonl@[1:2:3]")["data.path"]
    assert "has no splits" in problems("data.path={path: train.jsonl, split: test}")["data.path"]
    assert "model is not that" in problems("data.path=model")["data.path"]
    assert "milepost prepare" in problems("model.path=Qwen/Qwen3-0.6B")["model.path"]


def test_a_weight_is_for_training_prompts(project: Path) -> None:
    found = problems("eval.datasets=[{name: a, path: {path: train.jsonl, weight: 2}}]")
    assert found == {"eval.datasets.0.path.weight": "has an effect on training prompts only; remove it"}


def test_wrong_sources_are_explained(project: Path) -> None:
    assert "weight" in str(problems("data.path={path: train.jsonl, wieght: 2}"))
    assert "greater than 0" in problems("data.path={path: train.jsonl, weight: 0}")["data.path.weight"]
    assert "at least one source" in problems("data.path=[]")["data.path"]
    assert "expected text" in problems("data.path=3")["data.path"]


def test_names_that_were_fetched_are_found_in_the_cache(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = project / "cache"
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    model = fetched(cache, "model", "toy/model")
    (model / "config.json").write_text((project / "model" / "config.json").read_text())
    data = fetched(cache, "dataset", "toy/data")
    (data / "train.jsonl").write_text((project / "train.jsonl").read_text())
    made = plan("model.path=toy/model", "data.path=toy/data@[:8]", "rollout.num_rollouts=null", "rollout.num_epochs=1")
    assert made.model_path == model
    assert made.config.model.path == str(model)
    assert made.config.data.path == f"{data}@[:8]"
    assert made.num_rollouts == 1
