import json
import string
import subprocess
import sys
from collections import Counter

import pytest
from milepost.config.schema import DatasetFields
from milepost.data import PromptSource, load_dataset, lookup
from milepost.errors import CheckpointError, ConfigError, DataError
from milepost.tokenizer import load_tokenizer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if thinking %}<think>{% endif %}{% endif %}"
)
SPECIAL = ["<pad>", "<bos>", "<eos>", "<end>", "<think>", "</think>"]
PAD, BOS, EOS, END, THINK, CLOSE = range(6)


def write_tokenizer(folder, *, template=TEMPLATE, begin=False, eos="<eos>", generation=None):
    """A real tokenizer of one token per printable character; `begin` puts <bos> before a text, as Llama's does."""
    vocab = {token: i for i, token in enumerate(SPECIAL + list(string.printable))}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=None))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    if begin:
        backend.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    extra = {"bos_token": "<bos>"} if begin else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token=eos, **extra)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>", "<think>", "</think>"]})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), generation=[END, EOS])


@pytest.fixture
def rows(tmp_path):
    def write(*rows, name="rows.jsonl"):
        path = tmp_path / name
        path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
        return path

    return write


def test_tokenizer_round_trip_keeps_think_tokens_and_drops_end_tokens(tokenizer):
    ids = tokenizer.encode("<think>a b</think>7")
    assert ids[0] == THINK
    assert ids[4] == CLOSE
    assert len(ids) == 6
    assert tokenizer.decode([PAD, *ids, END, EOS, PAD]) == "<think>a b</think>7"


def test_end_tokens_come_from_generation_config_and_tokenizer(tmp_path, tokenizer):
    assert tokenizer.end_token_ids == (END, EOS)
    assert tokenizer.pad_id == PAD
    (tmp_path / "one").mkdir()
    assert write_tokenizer(tmp_path / "one", generation=END).end_token_ids == (END, EOS)
    (tmp_path / "own").mkdir()
    assert write_tokenizer(tmp_path / "own").end_token_ids == (EOS,)
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match="no end token"):
        write_tokenizer(tmp_path / "none", eos=None)


def test_load_tokenizer_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match="not a folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)


def test_plain_prompts_begin_as_the_tokenizer_begins_texts(tmp_path, rows):
    tokenizer = write_tokenizer(tmp_path, begin=True)
    path = rows({"prompt": "ab", "label": 1}, {"prompt": "<bos>ab", "label": 1})
    tokens = [task.tokens for task in load_dataset(path, DatasetFields(), tokenizer).tasks]
    a, b = tokenizer.encode("ab")
    assert tokens == [(BOS, a, b), (BOS, a, b)]
    chat = load_dataset(path, DatasetFields(chat_template=True), tokenizer)
    assert BOS not in chat.tasks[0].tokens  # this template writes none


def test_chat_template_gets_its_arguments(tokenizer):
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages) == "<user>hi<end><assistant>"
    assert tokenizer.apply_chat_template(messages, thinking=True) == "<user>hi<end><assistant><think>"
    assert tokenizer.apply_chat_template(messages, add_generation_prompt=False) == "<user>hi<end>"
    with pytest.raises(ConfigError, match="tokenize"):
        tokenizer.apply_chat_template(messages, tokenize=True)


def test_missing_chat_template_is_a_config_error(tmp_path, rows):
    tokenizer = write_tokenizer(tmp_path, template=None)
    with pytest.raises(ConfigError, match="no chat template"):
        load_dataset(rows({"prompt": "a", "label": 1}), DatasetFields(chat_template=True), tokenizer)


def test_template_that_refuses_a_conversation_names_the_row(tmp_path, rows):
    tokenizer = write_tokenizer(tmp_path, template="{{ raise_exception('roles must alternate') }}")
    path = rows({"prompt": "a", "label": 1})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: .*\[user\].*roles must alternate"):
        load_dataset(path, DatasetFields(chat_template=True), tokenizer)


def test_prefix_and_suffix_surround_a_plain_prompt(tokenizer, rows):
    fields = DatasetFields(prompt_prefix="Q: ", prompt_suffix="=")
    dataset = load_dataset(rows({"prompt": "1+1", "label": "2", "metadata": {"level": 3}}), fields, tokenizer)
    (task,) = dataset.tasks
    assert (task.index, task.prompt, task.label, task.metadata) == (0, "Q: 1+1=", "2", {"level": 3})
    assert list(task.tokens) == tokenizer.encode("Q: 1+1=")


def test_prefix_and_suffix_surround_the_last_user_message(tokenizer, rows):
    messages = [{"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "b"), ("user", "c")]]
    fields = DatasetFields(
        chat_template=True, system="S", prompt_prefix="(", prompt_suffix=")", chat_template_args={"thinking": True}
    )
    dataset = load_dataset(rows({"prompt": messages, "label": 0}), fields, tokenizer)
    expected = "<system>S<end><user>a<end><assistant>b<end><user>(c)<end><assistant><think>"
    assert dataset.tasks[0].prompt == expected


@pytest.mark.parametrize(
    ("path", "expected"),
    [("a", {"0": [5, {"b": 6}]}), ("a.0.1.b", 6), ("x.y", 7), ("x.y.z", 8), ("p.q.r", 9), ("t.0", None)],
)
def test_dotted_paths(path, expected):
    row = {
        "a": {"0": [5, {"b": 6}]},
        "x.y": 7,
        "x": {"y": {"z": 8}},
        "p.q": {"s": 0},
        "p": {"q": {"r": 9}},
        "t": [None],
    }
    assert lookup(row, path) == expected


@pytest.mark.parametrize("path", ["z", "a.b.c", "l.2", "l.-1", "l.x", ""])
def test_dotted_path_to_nothing(path):
    with pytest.raises(KeyError):
        lookup({"a": {"b": 1}, "l": [1, 2]}, path)


def test_label_by_regex(tokenizer, rows):
    path = rows({"q": "x", "answer": {"text": "so 3+4\n#### 7"}})
    fields = DatasetFields(prompt="q", label={"key": "answer.text", "regex": "#### (.*)"})
    assert load_dataset(path, fields, tokenizer).tasks[0].label == "7"
    whole = DatasetFields(prompt="q", label={"key": "answer.text", "regex": r"\d\+\d"})
    assert load_dataset(path, whole, tokenizer).tasks[0].label == "3+4"


def test_no_label_where_none_is_wanted(tokenizer, rows):
    assert load_dataset(rows({"prompt": "x"}), DatasetFields(label=None), tokenizer).tasks[0].label is None


GOOD = {"prompt": "x", "label": 1}


@pytest.mark.parametrize(
    ("line", "fields", "message"),
    [
        ("{'prompt': 1}\n", {}, "expected one JSON object per line"),
        ('{"prompt": "x", "lab', {}, "expected one JSON object per line"),
        ("[1, 2]\n", {}, r"expected a JSON object, found \[1, 2\]"),
        ({"text": "x", "label": 1}, {}, "expected the prompt at 'prompt'; the row has the keys 'text', 'label'"),
        ({"prompt": "x"}, {}, "expected the label at 'label'.*label: null"),
        ({"prompt": "x", "label": None}, {}, "label at 'label' is null"),
        ({"prompt": 5, "label": 1}, {}, "prompt at 'prompt' is 5; expected a text, or a list of chat messages"),
        ({"prompt": "", "label": 1}, {}, "prompt is empty"),
        ({"prompt": "x", "label": 1, "metadata": [1]}, {}, r"'metadata' is \[1\], expected a mapping"),
        ({"prompt": "x", "label": "none"}, {"label": {"key": "label", "regex": "#### (.*)"}}, "finds no label"),
        ({"prompt": "x", "label": 3}, {"label": {"key": "label", "regex": "3"}}, "expected a text to search"),
        ({"prompt": [{"role": "user", "content": "x"}], "label": 1}, {}, "need chat_template: true"),
        ({"prompt": [{"role": "user"}], "label": 1}, {"chat_template": True}, "message 0 of 'prompt'"),
        ({"prompt": [], "label": 1}, {"chat_template": True}, r"is \[\]; expected a text"),
        (
            {"prompt": [{"role": "assistant", "content": "x"}], "label": 1},
            {"chat_template": True, "prompt_suffix": "!"},
            "no message of role 'user'",
        ),
        (
            {"prompt": [{"role": "system", "content": "x"}, {"role": "user", "content": "x"}], "label": 1},
            {"chat_template": True, "system": "S"},
            "brings a system message",
        ),
    ],
)
def test_broken_row_is_named_by_file_and_line(tokenizer, rows, line, fields, message):
    good = {"prompt": "x", "label": "#### 1 3"}
    path = rows(good, "\n", line)
    with pytest.raises(DataError, match=rf"rows\.jsonl:3: .*{message}"):
        load_dataset(path, DatasetFields(**fields), tokenizer)


def test_bytes_that_are_no_text_are_named_by_file_and_line(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(json.dumps(GOOD).encode() + b'\n{"prompt": "\xff", "label": 1}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*utf-8"):
        load_dataset(path, DatasetFields(), tokenizer)


def test_byte_order_mark_is_fine(tokenizer, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert len(load_dataset(path, DatasetFields(), tokenizer)) == 1


def test_system_message_needs_a_chat_template(tokenizer, rows):
    with pytest.raises(ConfigError, match="needs chat_template"):
        load_dataset(rows(GOOD), DatasetFields(system="S"), tokenizer)


def test_files_that_cannot_be_read(tokenizer, rows, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        load_dataset(tmp_path / "absent.jsonl", DatasetFields(), tokenizer)
    with pytest.raises(DataError, match="is a folder without a dataset"):
        load_dataset(tmp_path, DatasetFields(), tokenizer)
    with pytest.raises(DataError, match=r"cannot read \.csv; expected \.jsonl, \.parquet"):
        load_dataset(rows(GOOD, name="rows.csv"), DatasetFields(), tokenizer)


def test_dedupe_length_and_limit_are_counted(tokenizer, rows):
    texts = ["ab", "abc", "ab", "abcd", "a", "ab", "x"]
    path = rows(*({"prompt": text, "label": i} for i, text in enumerate(texts)))
    dataset = load_dataset(path, DatasetFields(max_prompt_len=3), tokenizer, dedupe=True, limit=6)
    assert [(task.index, task.prompt, task.label) for task in dataset.tasks] == [
        (0, "ab", 0),
        (1, "abc", 1),
        (2, "a", 4),
    ]
    counts = dataset.counts
    assert (counts.rows, counts.duplicates, counts.too_long, counts.kept) == (6, 2, 1, 3)
    assert str(counts) == "3 prompts of 6 rows (2 duplicates and 1 too long dropped)"


def test_nothing_left_is_an_error_with_the_counts(tokenizer, rows):
    with pytest.raises(DataError, match=r"no prompt is left: 0 prompts of 1 rows.*1 too long.*max_prompt_len is 2"):
        load_dataset(rows({"prompt": "abc", "label": 1}), DatasetFields(max_prompt_len=2), tokenizer)
    with pytest.raises(DataError, match="0 prompts of 0 rows"):
        load_dataset(rows(), DatasetFields(), tokenizer)


def make_dataset(rows, tokenizer, count=10, label="l"):
    path = rows(*({"prompt": f"p{i}", "label": f"{label}{i}"} for i in range(count)))
    return load_dataset(path, DatasetFields(), tokenizer)


def test_batches_run_across_epochs_and_drop_nothing(tokenizer, rows):
    source = PromptSource(make_dataset(rows, tokenizer), batch_size=4, shuffle=True, seed=3)
    drawn = [task.index for _ in range(5) for task in source.next_batch()]
    assert len(drawn) == 20
    first, second = drawn[:10], drawn[10:]
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second  # another order in another epoch
    assert (source.epoch, source.position) == (2, 0)


def test_batch_larger_than_the_data(tokenizer, rows):
    source = PromptSource(make_dataset(rows, tokenizer, 3), batch_size=8, shuffle=False, seed=0)
    assert [task.index for task in source.next_batch()] == [0, 1, 2, 0, 1, 2, 0, 1]
    assert [task.index for task in source.take(2)] == [2, 0]


def test_order_depends_on_the_seed_alone(tokenizer, rows):
    dataset = make_dataset(rows, tokenizer)

    def draw(seed):
        return [task.index for task in PromptSource(dataset, 10, shuffle=True, seed=seed).next_batch()]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert Counter(draw(2)) == Counter(range(10))


def test_order_is_the_same_in_another_process(tokenizer, rows):
    dataset = make_dataset(rows, tokenizer)
    here = [task.index for task in PromptSource(dataset, 10, shuffle=True, seed=7).next_batch()]
    program = (
        "import sys; from pathlib import Path; from milepost.config.schema import DatasetFields\n"
        "from milepost.data import PromptSource, load_dataset; from milepost.tokenizer import load_tokenizer\n"
        "dataset = load_dataset(sys.argv[1], DatasetFields(), load_tokenizer(sys.argv[2]))\n"
        "print(dataset.fingerprint, [t.index for t in PromptSource(dataset, 10, True, 7).next_batch()])"
    )
    there = subprocess.run(
        [sys.executable, "-c", program, dataset.name, tokenizer.name], capture_output=True, text=True, check=True
    )
    assert there.stdout.strip() == f"{dataset.fingerprint} {here}"


def test_resumed_source_goes_on_where_it_was(tokenizer, rows):
    dataset = make_dataset(rows, tokenizer)
    source = PromptSource(dataset, batch_size=4, shuffle=True, seed=5)
    for _ in range(3):
        source.next_batch()
    state = json.loads(json.dumps(source.state_dict()))
    expected = [[task.index for task in source.next_batch()] for _ in range(4)]
    resumed = PromptSource(dataset, batch_size=4, shuffle=True, seed=5)
    resumed.load_state_dict(state)
    assert [[task.index for task in resumed.next_batch()] for _ in range(4)] == expected


def test_resume_refuses_other_data_or_another_order(tokenizer, rows):
    state = PromptSource(make_dataset(rows, tokenizer), 4, shuffle=True, seed=5).state_dict()
    same = make_dataset(rows, tokenizer)
    PromptSource(same, 2, shuffle=True, seed=5).load_state_dict(state)  # another batch size is fine
    with pytest.raises(CheckpointError, match=r"run\.seed 5"):
        PromptSource(same, 4, shuffle=True, seed=6).load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"data\.shuffle True"):
        PromptSource(same, 4, shuffle=False, seed=5).load_state_dict(state)
    other = make_dataset(rows, tokenizer, label="m")
    with pytest.raises(CheckpointError, match="other prompts, labels or weights"):
        PromptSource(other, 4, shuffle=True, seed=5).load_state_dict(state)
    unshuffled = PromptSource(same, 4, shuffle=False, seed=5).state_dict()
    PromptSource(same, 4, shuffle=False, seed=6).load_state_dict(unshuffled)  # the seed orders nothing here
