"""Where prompts come from: parquet, dataset folders, slices, mixtures with weights, and the order they give."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from milepost.config.schema import DatasetFields, DataSource
from milepost.data import Dataset, PromptSource, load_dataset
from milepost.errors import CheckpointError, DataError
from milepost.tokenizer import Tokenizer, load_tokenizer
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token per letter or digit."""
    folder = tmp_path_factory.mktemp("tokenizer")
    vocab = {token: i for i, token in enumerate(["<eos>", *"abcdefghijklmnopqrstuvwxyz0123456789"])}
    backend = Backend(models.WordLevel(vocab, unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    made.chat_template = "{% for m in messages %}{{ m.content }}{% if 'name' in m %}{{ m.name }}{% endif %}{% endfor %}"
    made.save_pretrained(folder)
    return load_tokenizer(folder)


def make_rows(letter: str, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{letter}{i}", "label": i} for i in range(count)]


def write_jsonl(path: Path, letter: str, count: int) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in make_rows(letter, count)))
    return path


def write_parquet(path: Path, letter: str, count: int) -> Path:
    pq.write_table(pa.Table.from_pylist(make_rows(letter, count)), path)
    return path


@pytest.fixture
def load(tokenizer: Tokenizer) -> Any:
    def load(*sources: Any, **options: Any) -> Dataset:
        path = sources[0] if len(sources) == 1 else list(sources)
        return load_dataset(path, options.pop("fields", DatasetFields()), tokenizer, **options)

    return load


def prompts(dataset: Dataset) -> list[str]:
    return [task.prompt for task in dataset.tasks]


def test_parquet_gives_the_rows_jsonl_gives(load: Any, tmp_path: Path) -> None:
    lines = load(write_jsonl(tmp_path / "rows.jsonl", "a", 5))
    columns = load(write_parquet(tmp_path / "rows.parquet", "a", 5))
    assert columns.tasks == lines.tasks
    assert columns.fingerprint == lines.fingerprint


def test_messages_in_columns_lose_the_keys_that_only_others_have(load: Any, tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "a", "name": None}, {"role": "user", "content": "b", "name": "c"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    dataset = load(tmp_path / "chat.parquet", fields=DatasetFields(label=None, chat_template=True))
    assert prompts(dataset) == ["abc"]


def test_a_broken_parquet_row_or_file_is_named(load: Any, tmp_path: Path) -> None:
    pq.write_table(
        pa.Table.from_pylist([{"prompt": "a", "label": 1}, {"prompt": None, "label": 2}]), tmp_path / "n.parquet"
    )
    with pytest.raises(DataError, match=r"n\.parquet:2: the prompt at 'prompt' is null"):
        load(tmp_path / "n.parquet")
    (tmp_path / "no.parquet").write_text("text")
    with pytest.raises(DataError, match=r"no\.parquet is no parquet file"):
        load(tmp_path / "no.parquet")


def test_a_saved_dataset_and_its_splits(load: Any, tmp_path: Path) -> None:
    one = datasets.Dataset.from_list(make_rows("a", 3))
    one.save_to_disk(tmp_path / "one")
    assert prompts(load(str(tmp_path / "one"))) == ["a0", "a1", "a2"]
    both = datasets.DatasetDict({"train": one, "test": datasets.Dataset.from_list(make_rows("b", 2))})
    both.save_to_disk(tmp_path / "both")
    assert prompts(load(str(tmp_path / "both"))) == ["a0", "a1", "a2"]
    assert prompts(load(DataSource(path=str(tmp_path / "both"), split="test"))) == ["b0", "b1"]
    with pytest.raises(DataError, match=r"no split 'dev'; it has 'train', 'test'"):
        load(DataSource(path=str(tmp_path / "both"), split="dev"))


def test_a_folder_of_files_as_the_hub_has_them(load: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "train-00000-of-00001.parquet", "a", 3)
    write_parquet(tmp_path / "data" / "test-00000-of-00001.parquet", "b", 2)
    assert prompts(load(str(tmp_path))) == ["a0", "a1", "a2"]
    assert prompts(load(DataSource(path=f"{tmp_path}@[1:]", split="test"))) == ["b1"]
    with pytest.raises(DataError, match="cannot read split 'dev'"):
        load(DataSource(path=str(tmp_path), split="dev"))


def test_subsets_are_those_of_the_folders_readme(load: Any, tmp_path: Path) -> None:
    for subset, letter in (("main", "a"), ("hard", "b")):
        (tmp_path / subset).mkdir()
        for split, count in (("train", 3), ("test", 2)):
            write_parquet(tmp_path / subset / f"{split}.parquet", letter, count)
    configs = "".join(
        f"- config_name: {subset}\n  data_files:\n"
        + "".join(f"  - {{split: {split}, path: {subset}/{split}.parquet}}\n" for split in ("train", "test"))
        for subset in ("main", "hard")
    )
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n# Sums\n")
    assert prompts(load(DataSource(path=str(tmp_path), subset="main"))) == ["a0", "a1", "a2"]
    assert prompts(load(DataSource(path=str(tmp_path), subset="hard", split="test"))) == ["b0", "b1"]
    with pytest.raises(DataError, match="Config name is missing"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ("[1:3]", "a1 a2"),
        ("[:2]", "a0 a1"),
        ("[3:]", "a3 a4"),
        ("[-2:]", "a3 a4"),
        ("[:-4]", "a0"),
        ("[:]", "a0 a1 a2 a3 a4"),
    ],
)
def test_slices_are_pythons(load: Any, tmp_path: Path, rows: str, expected: str) -> None:
    for write, name in ((write_jsonl, "rows.jsonl"), (write_parquet, "rows.parquet")):
        assert prompts(load(f"{write(tmp_path / name, 'a', 5)}@{rows}")) == expected.split()


def test_several_sources_stand_behind_one_another(load: Any, tmp_path: Path) -> None:
    first, second = write_jsonl(tmp_path / "a.jsonl", "a", 3), write_parquet(tmp_path / "b.parquet", "b", 2)
    dataset = load(f"{first}@[1:]", DataSource(path=str(second), weight=2))
    assert prompts(dataset) == ["a1", "a2", "b0", "b1"]
    assert [(span.start, span.stop, span.weight) for span in dataset.spans] == [(0, 2, 1), (2, 4, 2)]
    assert [task.index for task in dataset.tasks] == [0, 1, 2, 3]
    assert prompts(load(str(first), str(second), limit=4)) == ["a0", "a1", "a2", "b0"]
    with pytest.raises(DataError, match=r"a\.jsonl@\[9:\]: no prompt is left: 0 prompts of 0 rows"):
        load(str(second), f"{first}@[9:]")


def test_duplicates_are_dropped_across_sources(load: Any, tmp_path: Path) -> None:
    first, second = write_jsonl(tmp_path / "a.jsonl", "a", 3), write_jsonl(tmp_path / "b.jsonl", "a", 5)
    dataset = load(str(first), str(second), dedupe=True)
    assert prompts(dataset) == ["a0", "a1", "a2", "a3", "a4"]
    assert (dataset.counts.rows, dataset.counts.duplicates) == (8, 3)


def drawn(source: PromptSource, count: int) -> list[str]:
    return [task.prompt for task in source.take(count)]


def test_a_weight_is_how_often_a_row_comes_up_in_an_epoch(load: Any, tmp_path: Path) -> None:
    first, second = write_jsonl(tmp_path / "a.jsonl", "a", 3), write_jsonl(tmp_path / "b.jsonl", "b", 4)
    dataset = load(DataSource(path=str(first), weight=2), DataSource(path=str(second), weight=0.5))
    source = PromptSource(dataset, 4, shuffle=True, seed=1)
    # an epoch has 2 x 3 + 4 / 2 = 8 prompts; the four b come up once in two epochs
    epochs = [drawn(source, 8) for _ in range(4)]
    for epoch in epochs:
        assert Counter(prompt for prompt in epoch if prompt[0] == "a") == {"a0": 2, "a1": 2, "a2": 2}
    halves = [[prompt for prompt in epoch if prompt[0] == "b"] for epoch in epochs]
    assert sorted(halves[0] + halves[1]) == sorted(halves[2] + halves[3]) == ["b0", "b1", "b2", "b3"]
    assert (source.epoch, source.position) == (4, 0)
    plain = PromptSource(dataset, 4, shuffle=False, seed=0)
    assert drawn(plain, 8) == ["a0", "a1", "a2", "a0", "a1", "a2", "b0", "b1"]
    assert drawn(plain, 8) == ["a0", "a1", "a2", "a0", "a1", "a2", "b2", "b3"]


def test_a_weight_that_gives_no_whole_number_is_made_up_for(load: Any, tmp_path: Path) -> None:
    dataset = load(DataSource(path=str(write_jsonl(tmp_path / "a.jsonl", "a", 3)), weight=0.1))
    source = PromptSource(dataset, 1, shuffle=False, seed=0)
    # 0.3 rows an epoch: the first comes up in epoch 3, when 4 x 0.3 exceeds 1; ten epochs see each row once
    assert drawn(source, 3) == ["a0", "a1", "a2"]
    assert source.epoch == 10


def test_one_source_of_weight_one_keeps_the_order_it_always_had(load: Any, tmp_path: Path) -> None:
    source = PromptSource(load(write_jsonl(tmp_path / "a.jsonl", "a", 6)), 6, shuffle=True, seed=3)
    # numpy: Generator(PCG64((3, 0))).permutation(6) and Generator(PCG64((3, 1))).permutation(6)
    assert [task.index for task in source.take(12)] == [2, 5, 4, 1, 3, 0, 1, 2, 0, 4, 5, 3]


def test_a_mixture_resumes_where_it_was_and_knows_its_weights(load: Any, tmp_path: Path) -> None:
    first, second = write_jsonl(tmp_path / "a.jsonl", "a", 5), write_jsonl(tmp_path / "b.jsonl", "b", 7)

    def mixture(weight: float) -> Dataset:
        return load(str(first), DataSource(path=str(second), weight=weight))

    source = PromptSource(mixture(0.3), 4, shuffle=True, seed=5)
    drawn(source, 17)
    state = json.loads(json.dumps(source.state_dict()))
    resumed = PromptSource(mixture(0.3), 4, shuffle=True, seed=5)
    resumed.load_state_dict(state)
    assert drawn(resumed, 40) == drawn(source, 40)
    with pytest.raises(CheckpointError, match="other prompts, labels or weights"):
        PromptSource(mixture(0.4), 4, shuffle=True, seed=5).load_state_dict(state)
