"""The local engine beside transformers' `generate`, on the same weights, in one run: only the ratio means something.

    OMP_NUM_THREADS=1 python benchmarks/local_engine.py [--repeats 5]

Two shapes of tiny Qwen3 on the CPU, 4 prompts x 4 samples x 32 tokens and 16 x 4 x 64. Both sides sample at temperature
1 and no row ends early; runs alternate, the medians count.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time

import torch
from milepost.rollout.engine import SamplingParams
from milepost.rollout.local import LocalEngine
from milepost.rollout.local.decoder import LeanDecoder
from milepost.samples import Sample, Task
from transformers import Qwen3Config, Qwen3ForCausalLM

SHAPES = {"small": (64, 2, 4, 4, 32), "large": (256, 3, 16, 4, 64)}
"""Hidden size, layers, prompts, samples per prompt, new tokens."""
PROMPT_LENGTH = 12


def make_model(hidden: int, layers: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
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
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).float().eval()


async def generate(engine: LocalEngine, prompts: list[list[int]], samples: int, params: SamplingParams) -> list[Sample]:
    tasks = [Task(index=i, prompt="", tokens=tuple(prompt)) for i, prompt in enumerate(prompts)]
    return await asyncio.gather(
        *[engine.generate(task, task.tokens, params, (task.index, j)) for task in tasks for j in range(samples)]
    )


async def start(model: Qwen3ForCausalLM) -> LocalEngine:
    decoder = LeanDecoder(model.config.to_dict(), torch.float32, torch.device("cpu"))
    engine = LocalEngine(decoder=decoder, decode=str, end_token_ids=(), max_positions=512)
    await engine.start()
    engine.load(list(model.named_parameters()))
    engine.serve(0)
    return engine


async def measure(name: str, repeats: int) -> None:
    hidden, layers, num_prompts, samples, length = SHAPES[name]
    model = make_model(hidden, layers)
    prompts = torch.randint(3, 512, (num_prompts, PROMPT_LENGTH), generator=torch.Generator().manual_seed(1))
    engine = await start(model)
    ours, theirs = [], []
    for _ in range(1 + repeats):
        started = time.perf_counter()
        await generate(engine, prompts.tolist(), samples, SamplingParams(length))
        between = time.perf_counter()
        model.generate(prompts, do_sample=True, top_k=0, max_new_tokens=length, num_return_sequences=samples)
        ours.append(between - started)
        theirs.append(time.perf_counter() - between)
    await engine.stop()
    ours_s, theirs_s = statistics.median(ours[1:]), statistics.median(theirs[1:])  # the first round warms up
    print(
        f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, {num_prompts * samples * length} tokens: "
        f"engine {ours_s:.4f} s, generate {theirs_s:.4f} s, ratio {theirs_s / ours_s:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in SHAPES:
        asyncio.run(measure(name, arguments.repeats))


if __name__ == "__main__":
    main()
