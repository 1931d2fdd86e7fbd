"""What both sides train: a randomly initialised Qwen3 on short questions, rewarded for digits.

    python task.py FOLDER [--hidden 64] [--layers 2]

writes a checkpoint, its tokenizer and the prompts. The model is made from a seed and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

END, PAD = "<|im_end|>", "<|endoftext|>"
LR = 1e-5
"""So low that the policy stays what it is: both sides then generate responses of the same length throughout."""


def digit_share(text: str) -> float:
    """Reward: the share of the response's characters that are digits."""
    return sum(character.isdigit() for character in text) / max(1, len(text))


def score(sample: Any) -> float:
    """The same for milepost's `python` reward."""
    return digit_share(sample.text)


def prompts() -> list[str]:
    return [f"What is {i} + {j}? Answer:" for i in range(16) for j in range(16)]


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=[PAD, "<|im_start|>", END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [f"What is {i} + {j}? Answer: {i + j}" for i in range(50) for j in range(20)]
    backend.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END, pad_token=PAD)


def make(folder: Path, hidden: int, layers: int) -> int:
    """Write everything into the folder; return the number of parameters."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config).float()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts()]
    (folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    print(make(given.folder, given.hidden, given.layers))


if __name__ == "__main__":
    main()
