"""What packed attention costs, beside separate forwards and beside a padded batch.

    python benchmarks/packing.py [--device cuda] [--threads 1]

Prints one line per shape: milliseconds of forward and backward of attention alone, packed, one sample at a time and as
a padded batch. On a GPU, bfloat16, it also says how far the FlashAttention path lies from float32 attention.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from milepost.training.attention import packed_attention
from milepost.training.packing import Layout
from torch import Tensor, nn

SHAPES = {
    "16 x 256": (256,) * 16,
    "241..271, 16 samples": tuple(range(241, 272, 2)),
    "512 x 20": (20,) * 512,
    "10..30, 512 samples": tuple(10 + 7 * i % 21 for i in range(512)),
    "20..2000, 32 samples": tuple(20 + i * 64 for i in range(32)),
}


def measure(run: Callable[[], None], device: torch.device, rounds: int) -> float:
    """Return the best of several rounds in milliseconds: processor time on a CPU, wall time on a GPU."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    best = float("inf")
    for _ in range(rounds + 2):
        start = clock()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, clock() - start)
    return 1e3 * best


def make_inputs(
    total: int, device: torch.device, dtype: torch.dtype, heads: tuple[int, int], width: int
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, heads[0], total, width), (1, heads[1], total, width), (1, heads[1], total, width)]
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in shapes]


def compare(name: str, lengths: tuple[int, ...], device: torch.device, rounds: int) -> None:
    dtype, heads, width = (torch.float32, (4, 2), 32) if device.type == "cpu" else (torch.bfloat16, (32, 8), 128)
    q, k, v = make_inputs(sum(lengths), device, dtype, heads, width)
    layout, module = Layout(lengths, device), nn.Module()

    def packed() -> None:
        packed_attention(module, q, k, v, None, packing=layout)[0].sum().backward()

    singles = [
        [part.detach().clone().requires_grad_() for part in parts]
        for parts in zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    ]

    def separate() -> None:
        for parts in singles:
            F.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True).sum().backward()

    longest = max(lengths)
    padded_inputs = [
        torch.zeros(len(lengths), x.shape[1], longest, width, device=device, dtype=dtype).requires_grad_()
        for x in (q, k, v)
    ]

    def padded() -> None:
        F.scaled_dot_product_attention(*padded_inputs, is_causal=True, enable_gqa=True).sum().backward()

    ours, single, batch = (measure(run, device, rounds) for run in (packed, separate, padded))
    print(f"{name:24} packed {ours:9.3f} ms   separate {single:9.3f} ms ({ours / single:.2f})   ", end="")
    print(f"padded {batch:9.3f} ms ({ours / batch:.2f})", flush=True)


def check_kernel(device: torch.device) -> None:
    """Compare the kernel's values and gradients with float32 attention one sample at a time."""
    lengths = (5, 130, 1, 64, 300)
    module = nn.Module()
    for window in (None, 50):
        inputs = make_inputs(sum(lengths), device, torch.bfloat16, (8, 2), 64)
        out = packed_attention(
            module, inputs[0], inputs[1], inputs[2], None, sliding_window=window, packing=Layout(lengths, device)
        )[0]
        exact = [x.detach().float().requires_grad_() for x in inputs]
        wide = packed_attention(
            module, exact[0], exact[1], exact[2], None, sliding_window=window, packing=Layout(lengths, device)
        )[0]
        upstream = torch.randn_like(wide)
        gradients = torch.autograd.grad(out, inputs, upstream.bfloat16())
        expected = torch.autograd.grad(wide, exact, upstream)
        pairs = [(out, wide), *zip(gradients, expected, strict=True)]
        errors = [((left.float() - right).norm() / right.norm()).item() for left, right in pairs]
        names = ("output", "dq", "dk", "dv")
        listing = ", ".join(f"{n} {e:.1e}" for n, e in zip(names, errors, strict=True))
        print(f"window {window}: relative distance from float32: {listing}")
        if max(errors) > 1e-2:
            raise SystemExit("the kernel is further from float32 than bfloat16 explains")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{options.threads} CPU threads"
    print(f"torch {torch.__version__}, {where}")
    if device.type == "cuda":
        check_kernel(device)
    for name, lengths in SHAPES.items():
        compare(name, lengths, device, options.rounds)


if __name__ == "__main__":
    main()
