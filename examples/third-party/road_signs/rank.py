"""Advantages from ranks: whatever the scale of a reward, the best response gets 1 and the worst -1."""

from __future__ import annotations

import torch
from milepost.training.inputs import AdvantageBatch, Estimate
from torch import Tensor


class Rank:
    """(worse - better) / (n - 1): rollouts of the group with a lower reward, minus those with a higher one."""

    def estimate(self, batch: AdvantageBatch) -> Estimate:
        """Return the advantages [N]; zero in a group of equal rewards or of one."""
        per_sample = batch.rewards.new_zeros(len(batch.rewards))
        for group in batch.groups.unique():
            members = (batch.groups == group).nonzero().squeeze(1)
            per_sample[members] = _ranks(batch.rewards[members], batch.rollouts[members])
        return Estimate(batch.spread(per_sample))


def _ranks(rewards: Tensor, rollouts: Tensor) -> Tensor:
    """Ranks of samples [n] among the rollouts of their group; a rollout counts once, however many samples it has."""
    unique, which = rollouts.unique(return_inverse=True)
    values = torch.zeros(len(unique)).scatter(0, which, rewards)
    signs = torch.sign(rewards[:, None] - values[None, :]).sum(1)
    return signs / max(1, len(unique) - 1)
