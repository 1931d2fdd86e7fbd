"""The quickstart's maker, on a model that is too small and too briefly trained to be any good."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["--hidden", "16", "--layers", "1", "--steps", "3", "--batch", "4", "--threads", "1"]


def load_maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("quickstart_maker", ROOT / "examples/quickstart/make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


maker = load_maker()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("quickstart") / "made"
    maker.main(["--out", str(out), *SMALL])
    return out


@pytest.mark.parametrize(
    ("left", "sign", "right", "correct", "wrong"),
    [
        (47, "+", 38, r"<think>15 8</think>\boxed{85}", r"<think>15 7</think>\boxed{75}"),  # carry forgotten
        (41, "+", 38, r"<think>9 7</think>\boxed{79}", r"<think>9 8</think>\boxed{89}"),  # carry invented
        (97, "+", 58, r"<think>15 15</think>\boxed{155}", r"<think>15 14</think>\boxed{145}"),
        (52, "-", 17, r"<think>-5 3</think>\boxed{35}", r"<think>-5 4</think>\boxed{45}"),  # borrow forgotten
        (48, "-", 13, r"<think>5 3</think>\boxed{35}", r"<think>5 2</think>\boxed{25}"),  # borrow invented
        (48, "-", 43, r"<think>5 0</think>\boxed{5}", r"<think>5 1</think>\boxed{15}"),  # where -5 would be below 0
        (30, "-", 30, r"<think>0 0</think>\boxed{0}", r"<think>0 1</think>\boxed{10}"),
    ],
)
def test_demonstrations(left: int, sign: str, right: int, correct: str, wrong: str) -> None:
    problem = maker.Problem(left, sign, right)
    assert problem.demonstration(wrong=False) == correct
    assert problem.demonstration(wrong=True) == wrong


def test_wrong_demonstrations_are_always_wrong_and_well_formed() -> None:
    learned, heldout = maker.make_problems(random.Random(0))
    for problem in learned + heldout:
        answer = int(problem.demonstration(wrong=True).partition("{")[2].rstrip("}"))
        assert abs(answer - problem.result) == 10
        assert answer >= 0


def test_heldout_pairs_occur_nowhere_else() -> None:
    learned, heldout = maker.make_problems(random.Random(3))
    pairs = [{frozenset((p.left, p.right)) for p in problems} for problems in (learned, heldout)]
    assert pairs[0].isdisjoint(pairs[1])
    assert len(heldout) == len(pairs[1]) == 500
    assert len(pairs[0]) + len(pairs[1]) == 90 * 91 // 2  # every unordered pair of 10..99, itself included
    assert {p.sign for p in heldout} == {p.sign for p in learned} == {"+", "-"}
    assert all(min(p.left, p.right) >= 10 and max(p.left, p.right) <= 99 and p.result >= 0 for p in learned + heldout)


def test_files_say_what_the_run_config_reads(made: Path) -> None:
    rows = [json.loads(line) for line in (made / "heldout.jsonl").read_text().splitlines()]
    assert len(rows) == 500
    for row in rows:
        (message,) = row["prompt"]
        assert message["role"] == "user"
        left, sign, right = message["content"].partition("+" if "+" in message["content"] else "-")
        assert int(row["label"]) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
    train = [json.loads(line)["prompt"][0]["content"] for line in (made / "train.jsonl").read_text().splitlines()]
    assert len(train) == len(set(train)) == 6000


def test_tokenizer_has_a_chat_template_and_keeps_thoughts(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "47+38"}], add_generation_prompt=True, return_dict=False
    )
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|user|>", "4", "7", "+", "3", "8", "<|end|>", "<|assistant|>"]
    text = r"<think>-5 3</think>\boxed{35}"
    ids = tokenizer(text + "<|end|>")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == [
        "<think>", "-", "5", " ", "3", "</think>", r"\boxed{", "3", "5", "}", "<|end|>",
    ]  # fmt: skip
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]


def test_no_demonstration_is_longer_than_the_run_allows(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    config = yaml.safe_load((ROOT / "examples/quickstart.yaml").read_text())
    learned, heldout = maker.make_problems(random.Random(0))
    texts = [p.demonstration(wrong=wrong) + "<|end|>" for p in learned + heldout for wrong in (False, True)]
    longest = max(map(len, tokenizer(texts)["input_ids"]))
    assert longest == 13  # <think> 15 _ 12 </think> \boxed{ 125 } <|end|>
    assert longest < config["rollout"]["max_response_len"]


def test_checkpoint_is_a_qwen3_that_knows_its_end(made: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    model = AutoModelForCausalLM.from_pretrained(made / "model", local_files_only=True)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id


def test_warm_start_trains_on_the_response_alone(made: Path) -> None:
    """The prompt's tokens are drawn at random: a loss on them would stay at ln 10 a digit and hold the mean up."""
    arguments = maker.Arguments(seed=0, hidden=32, layers=1, steps=150, batch=32, lr=1e-2, wrong=0.0)
    torch.manual_seed(0)
    tokenizer = maker.make_tokenizer()
    model = maker.make_model(tokenizer, arguments)
    problem = maker.Problem(47, "+", 38)
    maker.warm_start(model, tokenizer, [problem], arguments, random.Random(0))
    prompt = tokenizer.apply_chat_template(
        maker.chat(problem), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(output) == r"<think>15 8</think>\boxed{85}<|end|>"
    with torch.no_grad():
        logits = model(**prompt).logits[0, 0]
    # After <|user|> stands nothing but 4 here; a model that had been trained on the prompt would be sure of it.
    assert logits.softmax(-1)[tokenizer.convert_tokens_to_ids("4")] < 0.5


def test_same_seed_same_files_and_other_seed_other_files(made: Path, tmp_path: Path) -> None:
    maker.main(["--out", str(tmp_path / "same"), *SMALL])
    maker.main(["--out", str(tmp_path / "other"), "--seed", "1", *SMALL])
    for name in ("model/model.safetensors", "train.jsonl", "heldout.jsonl"):
        assert (tmp_path / "same" / name).read_bytes() == (made / name).read_bytes()
        assert (tmp_path / "other" / name).read_bytes() != (made / name).read_bytes()


def test_makes_nothing_twice_and_replaces_only_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "made"
    maker.main(["--out", str(out), *SMALL])
    first = (out / "model/model.safetensors").stat().st_mtime_ns
    capsys.readouterr()
    maker.main(["--out", str(out), *SMALL])
    assert "nothing to do" in capsys.readouterr().out
    assert (out / "model/model.safetensors").stat().st_mtime_ns == first
    maker.main(["--out", str(out), "--seed", "1", *SMALL])
    assert json.loads((out / "made.json").read_text())["seed"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["made"]

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("precious")
    with pytest.raises(SystemExit, match="was not made by this program"):
        maker.main(["--out", str(tmp_path / "mine"), *SMALL])
    assert (tmp_path / "mine/notes.txt").read_text() == "precious"


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--hidden", "12"], "multiple of 8"), (["--wrong", "1.5"], "between 0 and 1"), (["--steps", "0"], "at least 1")],
)
def test_refuses_arguments_that_make_no_model(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        maker.main(flags)
    assert message in capsys.readouterr().err


def test_help_is_instant_and_needs_no_torch() -> None:
    code = (
        "import sys, runpy; sys.modules['torch'] = None; sys.modules['transformers'] = None; sys.argv[1:] = ['--help'];"
        f"runpy.run_path({str(ROOT / 'examples/quickstart/make.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--wrong" in done.stdout
