"""Generalised advantage estimation and discounted returns, over flat ragged batches without a loop over tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from milepost.functional.checks import check_flat, check_ragged
from milepost.functional.segments import sample_bounds

BLOCK = 32
"""Tokens that one row of the matrix product covers; measured best at a million tokens in 4,096 samples, one core."""


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
    layout = BlockLayout.of(mask, lengths)
    padded_values = layout.pad(values)
    delta = padded_values.new_zeros(padded_values.shape) if token_rewards is None else layout.pad(token_rewards)
    delta[layout.last] += rewards[layout.trained].double()
    delta -= padded_values
    _check_finite(delta, layout)
    delta[:-1] += gamma * padded_values[1:]
    # The padding before a sample has now seen that sample's first value.
    delta[layout.ends - 1] = 0.0
    advantages = layout.unpad(_block_sums(delta, layout.blocks, gamma * lam)).to(values.dtype)
    returns = torch.where(mask, advantages + values, advantages.new_zeros(()))
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


def discounted_sums(x: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """y_t = x_t + decay * y_{t+1} within each segment, starting anew in the next.

    Args:
        x: [n] float.
        lengths: [S] int64, length of each segment, 0 allowed; they sum to n.
        decay: in [0, 1].

    Returns:
        [n] float64. What a segment gets depends on its own numbers alone, bit for bit.
    """
    check_ragged(lengths, check_flat(x=x))
    layout = BlockLayout.of(torch.ones_like(x, dtype=torch.bool), lengths)
    return layout.unpad(_block_sums(layout.pad(x), layout.blocks, decay))


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where trainable tokens go when each sample gets blocks of its own, squeezed together and followed by padding.

    A sample of k trainable tokens has floor(k / BLOCK) + 1 blocks, so that padding follows even a full one.
    """

    slots: Tensor
    """[N] int64, place of each token; masked ones share the place after all blocks."""
    blocks: Tensor
    """[S] int64, blocks of each sample."""
    ends: Tensor
    """[S] int64, place after the last block of each sample."""
    trained: Tensor
    """[S] bool, samples with a trainable token."""
    last: Tensor
    """Place of the last trainable token of each sample that has one."""

    @classmethod
    def of(cls, mask: Tensor, lengths: Tensor) -> BlockLayout:
        """Lay out a flat batch: mask [N] bool and lengths [S] int64."""
        running = mask.cumsum(0)
        bounds = torch.cat([lengths.new_zeros(1), running])[sample_bounds(lengths)]
        counts = bounds.diff()
        blocks = counts // BLOCK + 1
        ends = blocks.cumsum(0) * BLOCK
        starts = ends - blocks * BLOCK
        shift = torch.repeat_interleave(starts - bounds[:-1] - 1, lengths, output_size=len(mask))
        size = int(ends[-1]) if len(ends) else 0
        slots = torch.where(mask, running.add_(shift), size)
        trained = counts > 0
        return cls(slots, blocks, ends, trained, (starts + counts - 1)[trained])

    def pad(self, x: Tensor) -> Tensor:
        """Bring x [N] into the blocks: [BLOCK x sum(blocks)] float64, zero in the padding."""
        size = int(self.ends[-1]) if len(self.ends) else 0
        padded = torch.zeros(size + 1, dtype=torch.float64, device=x.device)
        return padded.index_copy_(0, self.slots, x.double())[:size]

    def unpad(self, padded: Tensor) -> Tensor:
        """Bring values back to their tokens: [N] float64, zero where masked."""
        return torch.cat([padded, padded.new_zeros(1)]).index_select(0, self.slots)


def _check_finite(padded: Tensor, layout: BlockLayout) -> None:
    """Raise ValueError naming the first sample with a number that is not finite."""
    if not bool(torch.isfinite(padded.sum())):
        place = int((~torch.isfinite(padded)).nonzero()[0])
        sample = int(torch.searchsorted(layout.ends, place, right=True))
        raise ValueError(f"sample {sample} has a reward or value that is not finite; its critic or reward is broken")


def _block_sums(x: Tensor, blocks: Tensor, decay: float) -> Tensor:
    """Discounted sums in block layout: x [BLOCK x sum(blocks)] to the same.

    Within blocks by a matrix product; then each block adds what the later blocks of its sample sum to, which is the
    same problem over block heads with decay^BLOCK.
    """
    if not len(x):
        return x
    powers = torch.tensor(decay, dtype=x.dtype, device=x.device) ** torch.arange(BLOCK + 1, device=x.device)
    apart = torch.arange(BLOCK, device=x.device)[:, None] - torch.arange(BLOCK, device=x.device)[None, :]
    triangle = torch.where(apart >= 0, powers[apart.clamp(min=0)], 0.0)
    sums = x.view(-1, BLOCK) @ triangle
    if int(blocks.max()) > 1:
        heads = discounted_sums(sums[:, 0], blocks, decay**BLOCK)
        later = torch.cat([heads[1:], heads.new_zeros(1)])
        later[blocks.cumsum(0) - 1] = 0.0
        sums.addcmul_(later[:, None], powers[1:].flip(0)[None, :])
    return sums.view(-1)
