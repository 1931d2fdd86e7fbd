import pytest
from milepost.tracking.catalogue import CATALOGUE, describe, render_markdown


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("train/loss", "train/loss"),
        ("eval/aime24/accuracy", "eval/NAME/accuracy"),
        ("eval/aime-24.v2/pass@16", "eval/NAME/pass@k"),
        ("rollout/reward/format", "rollout/reward/NAME"),
    ],
)
def test_logged_name_finds_its_entry(metric, name):
    assert describe(metric) is CATALOGUE[name]


@pytest.mark.parametrize("metric", ["train/los", "train/loss2", "eval/a/b/accuracy", "eval/a/pass@", "eval/a/pass@k2"])
def test_unknown_name_finds_nothing(metric):
    assert describe(metric) is None


def test_every_entry_is_one_sentence():
    for name, entry in CATALOGUE.items():
        assert entry.meaning.endswith("."), name
        assert ". " not in entry.meaning, name
        assert "|" not in entry.meaning + entry.unit, name


def test_markdown_lists_every_metric_once():
    text = render_markdown()
    assert all(text.count(f"| `{name}` |") == 1 for name in CATALOGUE)
    assert "| `train/lr` | Learning rate of the step. |  |" in text
    assert text.startswith("## Every rollout\n\n| metric | meaning | unit |\n|---|---|---|\n| `rollout/raw_reward` |")
