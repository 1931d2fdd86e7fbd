"""Variable-length attention on a GPU in bfloat16 against float32, outputs and gradients: packed, and cut in zig-zag.

    python benchmarks/varlen_attention.py [--out RESULT.json]

The same functions that the trainers call (`packed_attention` and `ragged_attention`) run in bfloat16, where they take
`torch.nn.attention.varlen`, and in float32 with plain matrix products. An error is the largest difference, divided by
the largest value of the float32 tensor; bfloat16 rounds to 0.4%, and the float32 reference rounded to bfloat16 at the
inputs alone gives the floor that stands beside it. Prints a table and, as the last line, JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from milepost.training.attention import packed_attention, ragged_attention
from milepost.training.megatron.rows import local_tokens
from milepost.training.packing import Layout
from torch import Tensor, nn

HEADS, GROUPS, WIDTH = 32, 8, 128
RAGGED = (1, 2, 17, 128, 129, 640, 1000, 1531)
LIMIT = 0.02
"""Largest relative error that passes."""


def reference(q: Tensor, k: Tensor, v: Tensor, query_lengths: tuple[int, ...], key_lengths: tuple[int, ...]) -> Tensor:
    """Attention written out in the inputs' precision; the last query of a sample sees its last key."""
    outputs = []
    parts = (torch.split(q, query_lengths), torch.split(k, key_lengths), torch.split(v, key_lengths))
    for queries, keys, values in zip(*parts, strict=True):
        repeat = queries.shape[1] // keys.shape[1]
        keys, values = (x.repeat_interleave(repeat, 1).transpose(0, 1) for x in (keys, values))
        scores = queries.transpose(0, 1) @ keys.transpose(1, 2) * WIDTH**-0.5
        count, seen = scores.shape[1:]
        visible = torch.ones(count, seen, dtype=torch.bool, device=q.device).tril(seen - count)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        outputs.append((weights @ values).transpose(0, 1))
    return torch.cat(outputs)


def packed(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> Tensor:
    heads_first = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    return packed_attention(nn.Module(), *heads_first, None, None, packing=layout)[0][0]


def differentiate(
    function: Callable[..., Tensor], inputs: list[Tensor], grad: Tensor, dtype: torch.dtype
) -> list[Tensor]:
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    out = function(*leaves)
    out.backward(grad.to(dtype))
    return [out.detach().float(), *(leaf.grad.float() for leaf in leaves if leaf.grad is not None)]


def compare(
    name: str, run: Callable[..., Tensor], plain: Callable[..., Tensor], shapes: tuple[int, int]
) -> dict[str, Any]:
    generator = torch.Generator("cuda").manual_seed(1)

    def draw(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, WIDTH, device="cuda", generator=generator).bfloat16()

    queries, keys = shapes
    inputs = [draw(queries, HEADS), draw(keys, GROUPS), draw(keys, GROUPS)]
    grad = draw(queries, HEADS)
    exact = differentiate(plain, inputs, grad, torch.float32)
    found = differentiate(run, inputs, grad, torch.bfloat16)
    rounded = [x.bfloat16().float() for x in exact]
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, exact, strict=True)]
    floors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(rounded, exact, strict=True)]
    result = dict(zip(("out", "dq", "dk", "dv"), errors, strict=True))
    return {"case": name, **result, "floor": max(floors), "passes": max(errors) < LIMIT}


def zig_zag(context: int, rank: int, lengths: tuple[int, ...]) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Queries and keys of both halves of a rank; the tokens they name are the trainer's."""
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert len(local_tokens(lengths, starts, context, rank)) == sum(lengths) // context
    chunks = tuple(length // (2 * context) for length in lengths)
    pieces = {"early": rank, "late": 2 * context - 1 - rank}
    return [(half, chunks, tuple((piece + 1) * chunk for chunk in chunks)) for half, piece in pieces.items()]


def milliseconds(run: Callable[[], object]) -> float:
    for _ in range(3):
        run()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def speed() -> dict[str, float]:
    """Forward and backward of 16,384 packed tokens in sequences of 4,096: milliseconds and TFLOP/s."""
    lengths = (4096,) * 4
    layout = Layout(lengths, torch.device("cuda"))
    q = torch.randn(16384, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    k, v = (
        torch.randn(16384, GROUPS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(2)
    )
    grad = torch.randn_like(q)
    flops = 2.0 * 2.0 * HEADS * WIDTH * sum(length**2 for length in lengths) / 2
    with torch.no_grad():
        forward = milliseconds(lambda: packed(q, k, v, layout))
    both = milliseconds(lambda: packed(q, k, v, layout).backward(grad))
    return {
        "forward_ms": forward,
        "both_ms": both,
        "forward_tflops": flops / forward / 1e9,
        "both_tflops": 3.5 * flops / both / 1e9,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="also write the JSON there")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    cases = []
    for name, lengths in (("one of 2,048", (2048,)), ("ragged", RAGGED)):
        layout, total = Layout(lengths, torch.device("cuda")), sum(lengths)
        cases.append(
            compare(
                f"packed, {name}",
                lambda q, k, v, layout=layout: packed(q, k, v, layout),
                lambda q, k, v, lengths=lengths: reference(q, k, v, lengths, lengths),
                (total, total),
            )
        )
    for context, rank in ((2, 0), (2, 1), (4, 1)):
        for half, queries, keys in zig_zag(context, rank, (64, 640, 1536)):
            cases.append(
                compare(
                    f"context {context}, rank {rank}, {half}",
                    lambda q, k, v, a=queries, b=keys: ragged_attention(q, k, v, a, b),
                    lambda q, k, v, a=queries, b=keys: reference(q, k, v, a, b),
                    (sum(queries), sum(keys)),
                )
            )
    print(f"{'case':28} {'out':>8} {'dq':>8} {'dk':>8} {'dv':>8} {'floor':>8}")
    for case in cases:
        numbers = " ".join(f"{case[key]:8.1e}" for key in ("out", "dq", "dk", "dv", "floor"))
        print(f"{case['case']:28} {numbers} {'' if case['passes'] else 'FAILS'}")
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "limit": LIMIT,
        "cases": cases,
        "speed": speed(),
    }
    text = json.dumps(result)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)
    if not all(case["passes"] for case in cases):
        raise SystemExit("an error is over the limit")


if __name__ == "__main__":
    main()
