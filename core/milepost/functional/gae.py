"""Generalised advantage estimation and discounted returns, over flat ragged batches without a loop over tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from milepost.functional.checks import check_flat, check_ragged
from milepost.functional.segments import count_per_sample

BLOCK = 32
"""Tokens that one row of the scan's matrix product covers; measured best at a million tokens on one core."""


class Advantages(NamedTuple):
    """What `gae` returns; both [N], zero where masked."""

    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    gamma: float,
    lam: float,
    token_rewards: Tensor | None = None,
) -> Advantages:
    """Generalised advantage estimation (arXiv 1506.02438) over the trainable tokens only, squeezed together.

    delta_t = r_t + gamma V_{t+1} - V_t; A_t = delta_t + gamma lam A_{t+1}; returns = A + V. The outcome reward is
    added at a sample's last trainable token and there is no bootstrap after it; tokens between trainable ones (what an
    environment said) take no time.

    Args:
        rewards: [S], outcome rewards.
        values: [N], V_t read at the token before t; what stands at masked tokens does not matter.
        mask: [N] bool, trainable tokens.
        lengths: [S] int64, tokens per sample.
        gamma: discount, in [0, 1].
        lam: lambda, in [0, 1].
        token_rewards: [N], rewards at single tokens; those at masked tokens are ignored.

    Returns:
        Advantages and returns, [N] of the values' dtype. A sample without a trainable token has zeros, and its reward
        goes nowhere.

    Raises:
        ValueError: shapes disagree, gamma or lam is out of range, or a number that counts is not finite.
    """
    num_tokens = check_flat(values=values, mask=mask, token_rewards=token_rewards)
    check_flat(rewards=rewards, lengths=lengths)
    check_ragged(lengths, num_tokens)
    for name, number in (("gamma", gamma), ("lam", lam)):
        if not 0.0 <= number <= 1.0:
            raise ValueError(f"{name} is {number}, expected a number in [0, 1]")
    counts = count_per_sample(mask, lengths)
    positions = mask.nonzero().squeeze(1)
    values_at = values[positions].double()
    delta = _rewards_at(rewards, token_rewards, positions, counts) - values_at
    _check_finite(delta, counts)
    delta[:-1] += gamma * _cut_at_ends(values_at[1:], counts)
    advantages_at = discounted_sums(delta, counts, gamma * lam)
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    advantages[positions] = advantages_at.to(values.dtype)
    returns[positions] = (advantages_at + values_at).to(values.dtype)
    return Advantages(advantages, returns)


def reinforce_returns(
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    *,
    gamma: float = 1.0,
    kl: Tensor | None = None,
    beta: float = 0.0,
) -> Tensor:
    """G_t = r_t + gamma G_{t+1}, r_t = -beta m kl_t, + R at the last trainable token (REINFORCE++, arXiv 2501.03262).

    Runs over the trainable tokens only, squeezed together. REINFORCE++ whitens the result (`whitening.whiten`).

    Args:
        rewards: [S], outcome rewards R.
        mask: [N] bool, trainable tokens.
        lengths: [S] int64, tokens per sample.
        gamma: discount, in [0, 1].
        kl: [N], KL estimate of each token; None for no KL term.
        beta: its weight.

    Returns:
        [N] float32, zero where masked.

    Raises:
        ValueError: as `gae`.
    """
    token_rewards = None if kl is None else -beta * kl
    values = torch.zeros(mask.shape, device=mask.device)
    return gae(rewards, values, mask, lengths, gamma=gamma, lam=1.0, token_rewards=token_rewards).advantages


def _rewards_at(rewards: Tensor, token_rewards: Tensor | None, positions: Tensor, counts: Tensor) -> Tensor:
    """Rewards at the trainable tokens [n] float64: those of the tokens, and the outcome's at each sample's last."""
    if token_rewards is None:
        at = torch.zeros(len(positions), dtype=torch.float64, device=positions.device)
    else:
        at = token_rewards[positions].double()
    trained = counts > 0
    at[counts.cumsum(0)[trained] - 1] += rewards[trained].double()
    return at


def _check_finite(x: Tensor, counts: Tensor) -> None:
    """Raise ValueError naming the first sample with a non-finite number, before it spreads over the others."""
    if not bool(torch.isfinite(x.sum())):
        token = int((~torch.isfinite(x)).nonzero()[0])
        sample = int(torch.searchsorted(counts.cumsum(0), token, right=True))
        raise ValueError(f"sample {sample} has a reward or value that is not finite; the critic or reward is broken")


def _cut_at_ends(following: Tensor, counts: Tensor) -> Tensor:
    """Zero the entries of `following` [n - 1] that belong to the next sample; entry t follows token t."""
    following = following.clone()
    ends = counts[counts > 0].cumsum(0)[:-1]
    following[ends - 1] = 0.0
    return following


def discounted_sums(x: Tensor, counts: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay * y_{t+1} within each segment, starting anew in the next.

    The recursion runs over the flat batch as matrix products, and what came from the next segment is taken off again:
    decay^(tokens left) times the next segment's first sum.

    Args:
        x: [n] float64, finite.
        counts: [S] int64, length of each segment, 0 allowed; they sum to n.
        decay: in [0, 1].

    Returns:
        [n] float64.
    """
    check_ragged(counts, check_flat(x=x))
    if not len(x):
        return x.clone()
    sums = _scan(x, decay)
    sizes = counts[counts > 0]
    ends = sizes.cumsum(0)
    after = torch.cat([sums[ends[:-1]], sums.new_zeros(1)])
    num = len(x)
    powers = _powers(decay, int(sizes.max()) + 1, x)
    left = torch.repeat_interleave(ends, sizes, output_size=num) - torch.arange(num, device=x.device)
    return sums.sub_(powers[left].mul_(torch.repeat_interleave(after, sizes, output_size=num)))


def _scan(x: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay * y_{t+1} over all of x [n]: within blocks by a matrix product, across them by recursion."""
    num = len(x)
    if num <= BLOCK:
        return x @ _triangle(num, decay, x)
    num_blocks = -(-num // BLOCK)
    padded = torch.nn.functional.pad(x, (0, num_blocks * BLOCK - num)).view(num_blocks, BLOCK)
    within = padded @ _triangle(BLOCK, decay, x)
    starts = _scan(within[:, 0].contiguous(), decay**BLOCK)
    after = torch.cat([starts[1:], starts.new_zeros(1)])
    within.addcmul_(after[:, None], _powers(decay, BLOCK + 1, x)[1:].flip(0)[None])
    return within.view(-1)[:num]


def _powers(decay: float, num: int, like: Tensor) -> Tensor:
    """decay^0 ... decay^(num - 1), [num] float64."""
    return torch.pow(
        torch.tensor(decay, dtype=torch.float64, device=like.device), torch.arange(num, device=like.device)
    )


def _triangle(size: int, decay: float, like: Tensor) -> Tensor:
    """[size, size] whose entry (s, t) is decay^(s - t) for s >= t and 0 otherwise: x @ it sums what comes after t."""
    steps = torch.arange(size, device=like.device)
    apart = steps[:, None] - steps[None, :]
    return torch.where(apart >= 0, _powers(decay, size, like)[apart.clamp(min=0)], 0.0)
