"""Make what the quickstart trains: a tiny Qwen3 that does sums badly, and problems to do better on.

Writes, from a seed and with no download:

    OUT/model/          Qwen3ForCausalLM in Hugging Face format, with tokenizer and chat template
    OUT/train.jsonl     problems to train on, {"prompt": [{"role": "user", "content": "47+38"}], "label": "85"}
    OUT/heldout.jsonl   500 problems whose pair of operands occurs in no demonstration and in no training problem

The model is warm-started on demonstrations such as `<think>15 8</think>\\boxed{85}`: the sum of the ones, then that of
the tens with the carry. Most of the demonstrations get the carry wrong. So the model knows the form of an answer, finds
the right one now and then when sampled, and seldom when greedy: the case reinforcement learning is for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

ROOT = Path(__file__).resolve().parents[2]
SMALLEST, LARGEST = 10, 99
"""Operands have two digits each."""
NUM_HELDOUT = 500
NUM_TRAIN = 6000
MAX_POSITIONS = 64
MARK = "made.json"
"""Says what the folder it lies in was made with."""

PAD, END, USER, ASSISTANT, SYSTEM = "<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"
UNKNOWN = "<|unknown|>"
SPECIAL = (PAD, END, USER, ASSISTANT, SYSTEM, UNKNOWN)
MARKUP = ("<think>", "</think>", "\\boxed{")
"""Ordinary text that is one token each, as `<think>` is in Qwen3: decoding keeps it."""
CHARACTERS = "}+- 0123456789"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True, slots=True)
class Arguments:
    """Everything the outputs depend on, beside this file."""

    seed: int
    hidden: int
    layers: int
    steps: int
    batch: int
    lr: float
    wrong: float


@dataclass(frozen=True, slots=True)
class Problem:
    """`left sign right`, with a result of at least 0."""

    left: int
    sign: str
    right: int

    @property
    def text(self) -> str:
        """The problem as a user puts it."""
        return f"{self.left}{self.sign}{self.right}"

    @property
    def result(self) -> int:
        """The right answer."""
        return self.left + self.right if self.sign == "+" else self.left - self.right

    def demonstration(self, *, wrong: bool) -> str:
        """A worked answer: the ones, the tens after carrying or borrowing, the result in a box.

        A wrong one forgets the carry, or carries where there is nothing to carry.
        """
        ones = self.left % 10 + self.right % 10 if self.sign == "+" else self.left % 10 - self.right % 10
        carry = ones // 10
        result = self.result
        if wrong:
            if carry:
                result -= 10 * carry
            else:
                result += 10 if self.sign == "+" or result < 10 else -10
        return f"<think>{ones} {result // 10}</think>\\boxed{{{result}}}"


def make_problems(rng: random.Random) -> tuple[list[Problem], list[Problem]]:
    """Split all pairs of operands; return the problems to learn from and NUM_HELDOUT problems on the other pairs.

    A pair is held out with its mirror image and with both signs. Every pair of the first part gives a subtraction
    (the larger operand on the left) and two sums; every held-out pair gives one problem.
    """
    pairs = [(low, high) for high in range(SMALLEST, LARGEST + 1) for low in range(SMALLEST, high + 1)]
    rng.shuffle(pairs)
    heldout = []
    for low, high in pairs[:NUM_HELDOUT]:
        left, right = (low, high) if rng.random() < 0.5 else (high, low)
        heldout.append(Problem(high, "-", low) if rng.random() < 0.5 else Problem(left, "+", right))
    learned = []
    for low, high in pairs[NUM_HELDOUT:]:
        learned.append(Problem(high, "-", low))
        learned.append(Problem(low, "+", high) if rng.random() < 0.5 else Problem(high, "+", low))
    rng.shuffle(learned)
    return learned, heldout


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer of one token per character, role marks and markup aside, with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocabulary = {text: index for index, text in enumerate((*SPECIAL, *MARKUP, *CHARACTERS))}
    backend = Tokenizer(models.BPE(vocabulary, merges=[], unk_token=UNKNOWN))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        unk_token=UNKNOWN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_model(tokenizer: PreTrainedTokenizerFast, arguments: Arguments) -> Qwen3ForCausalLM:
    """A Qwen3 of a few hundred thousand parameters, float32, with fresh weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=arguments.hidden,
        intermediate_size=2 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=arguments.hidden // 4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen3ForCausalLM(config).float()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def chat(problem: Problem) -> list[dict[str, str]]:
    """The conversation that asks for a problem's result."""
    return [{"role": "user", "content": problem.text}]


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Problem],
    arguments: Arguments,
    rng: random.Random,
) -> None:
    """Teach the form of an answer by supervised steps on demonstrations, a share of them wrong.

    Rows are padded on the right, where causal attention needs no mask; the loss counts the response alone. The rate
    warms up over 20 steps and falls to 0 along a cosine.
    """
    import torch
    from torch.nn import functional
    from tqdm import tqdm

    chosen = rng.choices(problems, k=arguments.steps * arguments.batch)
    prompts = [tokenizer.apply_chat_template(chat(p), tokenize=False, add_generation_prompt=True) for p in chosen]
    answers = [p.demonstration(wrong=rng.random() < arguments.wrong) + END for p in chosen]
    encoded = tokenizer([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)], padding=True)
    tokens = torch.tensor(encoded["input_ids"])
    # A prompt ends with the only <|assistant|> of its row, and a response with the only <|end|> behind that.
    behind = (tokens == tokenizer.convert_tokens_to_ids(ASSISTANT)).cumsum(1) > 0
    targets = tokens[:, 1:].masked_fill(~behind[:, :-1] | (tokens[:, 1:] == tokenizer.pad_token_id), -100)

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, betas=(0.9, 0.95), weight_decay=0.0)
    bar = tqdm(range(arguments.steps), desc="warm start", unit="step", disable=not sys.stderr.isatty())
    for step in bar:
        rows = slice(step * arguments.batch, (step + 1) * arguments.batch)
        logits = model(input_ids=tokens[rows, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets[rows].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        decay = 0.5 * (1 + math.cos(math.pi * step / arguments.steps))
        optimizer.param_groups[0]["lr"] = arguments.lr * min(1.0, (step + 1) / 20) * decay
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bar.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()


def write_problems(path: Path, problems: Sequence[Problem]) -> None:
    """Write one JSON object per line."""
    rows = ({"prompt": chat(problem), "label": str(problem.result)} for problem in problems)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def fingerprint(arguments: Arguments) -> dict[str, Any]:
    """What decides the outputs: the arguments and this file's content."""
    return {**asdict(arguments), "maker": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}


def make(out: Path, arguments: Arguments) -> None:
    """Make everything in a folder beside `out` and move it there when it is complete.

    Raises SystemExit if `out` holds anything else, which is never replaced.
    """
    import torch

    if out.exists() and not (out / MARK).is_file() and any(out.iterdir()):
        raise SystemExit(f"{out} exists and was not made by this program; give another --out, or remove it yourself")

    torch.manual_seed(arguments.seed)
    rng = random.Random(arguments.seed)
    learned, heldout = make_problems(rng)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, arguments)
    warm_start(model, tokenizer, learned, arguments, rng)

    partial = out.with_name(f"{out.name}.partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    model.save_pretrained(partial / "model")
    tokenizer.save_pretrained(partial / "model")
    write_problems(partial / "train.jsonl", rng.sample(learned, NUM_TRAIN))
    write_problems(partial / "heldout.jsonl", heldout)
    (partial / MARK).write_text(json.dumps(fingerprint(arguments), indent=2) + "\n", encoding="utf-8")
    if out.exists():
        shutil.rmtree(out)
    partial.rename(out)


def is_made(out: Path, arguments: Arguments) -> bool:
    """Whether `out` holds what these arguments would make. It is written last, so it vouches for the rest."""
    mark = out / MARK
    return mark.is_file() and json.loads(mark.read_text(encoding="utf-8")) == fingerprint(arguments)


def parse(argv: Sequence[str] | None) -> tuple[Path, Arguments, int]:
    """Read the command line: output folder, what to make, CPU threads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "quickstart", help="output folder (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems, demonstrations and weights")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size, a multiple of 8 (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="layers (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=700, help="supervised steps (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="demonstrations per step (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=2e-3, help="largest learning rate (default: %(default)s)")
    parser.add_argument("--wrong", type=float, default=0.6, help="share of wrong demonstrations (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; a model this small has no use for more")
    given = parser.parse_args(argv)
    if given.hidden % 8:
        parser.error(f"--hidden {given.hidden}: expected a multiple of 8 (4 heads of even size)")
    if min(given.hidden, given.layers, given.steps, given.batch, given.threads) < 1:
        parser.error("--hidden, --layers, --steps, --batch and --threads must be at least 1")
    if not 0 <= given.wrong <= 1:
        parser.error(f"--wrong {given.wrong}: expected a share between 0 and 1")
    arguments = Arguments(given.seed, given.hidden, given.layers, given.steps, given.batch, given.lr, given.wrong)
    return given.out.resolve(), arguments, given.threads


def main(argv: Sequence[str] | None = None) -> None:
    """Make the outputs, unless they are there already."""
    out, arguments, threads = parse(argv)
    if is_made(out, arguments):
        print(f"{out}: made already, nothing to do")
        return
    import torch

    torch.set_num_threads(threads)
    make(out, arguments)
    print(f"{out}: model, {NUM_TRAIN} training problems, {NUM_HELDOUT} held-out problems")


if __name__ == "__main__":
    main()
