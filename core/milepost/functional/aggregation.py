"""How token losses become one number: a weight per token, computed centrally over one optimizer step."""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.components import Aggregation
from milepost.functional.checks import check_flat, check_ids, check_ragged
from milepost.functional.segments import count_per_sample


def token_weights(
    mask: Tensor,
    lengths: Tensor,
    rollouts: Tensor,
    *,
    aggregation: Aggregation,
    global_batch_size: int | None = None,
    constant: float | None = None,
) -> Tensor:
    """Weight of each token in the loss of its optimizer step, so that the loss is sum(w x l) wherever tokens lie.

    With m the trainable tokens, G the global batch size in rollouts, M all trainable tokens of the step:

    - sample_mean: 1 / (sum of m over the token's rollout x G). The sequences of one rollout share its weight: each of
      their trainable tokens counts alike, and together they weigh 1/G, as a rollout of one sequence does.
    - token_mean: 1 / M.
    - constant: 1 / (G x C), so long sequences weigh more (Dr.GRPO, arXiv 2503.20783).

    A rollout without a trainable token adds nothing but counts in G.

    Args:
        mask: [N] bool, trainable tokens of all samples of the step.
        lengths: [S] int64, tokens per sample.
        rollouts: [S] int64, which rollout each sample belongs to.
        aggregation: one of the three.
        global_batch_size: G; default the number of different rollouts given.
        constant: C in tokens, for `constant` alone; ignored by the others.

    Returns:
        [N] float32, zero where masked.

    Raises:
        ValueError: shapes disagree, the step has more rollouts than G, or C is missing or not positive.
    """
    num_tokens = check_flat(mask=mask)
    check_flat(lengths=lengths, rollouts=rollouts)
    check_ragged(lengths, num_tokens)
    check_ids(rollouts=rollouts)
    unique, inverse = torch.unique(rollouts, return_inverse=True)
    num_rollouts = len(unique) if global_batch_size is None else global_batch_size
    if len(unique) > num_rollouts:
        raise ValueError(
            f"{len(unique)} rollouts in a step of global_batch_size {num_rollouts}; weigh each step by itself"
        )
    counts = count_per_sample(mask, lengths)
    match aggregation:
        case "sample_mean":
            totals = counts.new_zeros(len(unique)).index_add(0, inverse, counts)
            shares = 1.0 / (totals.clamp(min=1).double() * num_rollouts)
            per_sample = shares[inverse]
        case "token_mean":
            per_sample = torch.full(lengths.shape, 1.0 / max(int(counts.sum()), 1), dtype=torch.float64)
        case "constant":
            if constant is None or constant <= 0:
                raise ValueError(f"constant aggregation divides by a length, got {constant}; give a positive number")
            per_sample = torch.full(lengths.shape, 1.0 / (num_rollouts * constant), dtype=torch.float64)
        case _:
            raise ValueError(f"unknown aggregation {aggregation!r}; expected sample_mean, token_mean or constant")
    spread = torch.repeat_interleave(per_sample.float(), lengths, output_size=num_tokens)
    return spread * mask
