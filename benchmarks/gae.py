"""GAE over 1,000,000 tokens in 4,096 ragged samples beside the plain recursion in Python, in one run.

    OMP_NUM_THREADS=1 python benchmarks/gae.py [--repeats 9]

Prints the median time of both on one thread, their ratio, and the largest error against the recursion in float64.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from milepost.functional.gae import gae

NUM_SAMPLES, NUM_TOKENS = 4096, 1_000_000
GAMMA, LAM = 1.0, 0.95


def plain(rewards: list[float], values: list[float], lengths: list[int]) -> list[float]:
    """The recursion of arXiv 1506.02438 as it stands, every token trainable, in float64."""
    advantages = [0.0] * len(values)
    end = 0
    for reward, length in zip(rewards, lengths, strict=True):
        begin, end = end, end + length
        advantage = next_value = 0.0
        for t in range(end - 1, begin - 1, -1):
            outcome = reward if t == end - 1 else 0.0
            advantage = outcome + GAMMA * next_value - values[t] + GAMMA * LAM * advantage
            advantages[t], next_value = advantage, values[t]
    return advantages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    shares = torch.empty(NUM_SAMPLES).log_normal_(0.0, 0.8, generator=generator)
    lengths = (shares / shares.sum() * NUM_TOKENS).long().clamp(min=1)
    lengths[0] += NUM_TOKENS - lengths.sum()
    values = torch.randn(NUM_TOKENS, generator=generator) * 0.3 + 0.5
    rewards = torch.randint(0, 2, (NUM_SAMPLES,), generator=generator).float()
    mask = torch.ones(NUM_TOKENS, dtype=torch.bool)

    fast = []
    for _ in range(repeats):
        start = time.perf_counter()
        result = gae(rewards, values, mask, lengths, gamma=GAMMA, lam=LAM)
        fast.append(time.perf_counter() - start)
    start = time.perf_counter()
    expected = plain(rewards.tolist(), values.tolist(), lengths.tolist())
    slow = time.perf_counter() - start
    error = (result.advantages.double() - torch.tensor(expected, dtype=torch.float64)).abs().max().item()
    median = statistics.median(fast)
    print(f"gae {median * 1e3:.1f} ms, plain {slow * 1e3:.0f} ms, ratio {slow / median:.1f}, largest error {error:.1e}")


if __name__ == "__main__":
    main()
