"""What losses and advantage estimators are given and what they return.

Everything is per token and flat: N tokens of S samples, one after the other. Entry t is about token t. Losses run on
whatever tokens a rank holds (under context parallelism, part of each sample), so they may combine tokens only through
`sample_sum` and `sample_mean`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from milepost.components import AdvantageInput
from milepost.functional.checks import check_flat, check_ragged

Reduction = Literal["mean", "sum", "max", "min"]
ADVANTAGE_INPUTS: tuple[AdvantageInput, ...] = get_args(AdvantageInput)


@dataclass(frozen=True, slots=True)
class Metric:
    """Values that are not yet reduced, and how to reduce them over the whole optimizer step.

    `mean` of per-token values is over the trainable tokens, of per-sample values over the samples. Values at masked
    tokens are ignored. Gradients never flow through a metric.
    """

    values: Tensor
    """[N] per token or [S] per sample."""
    reduction: Reduction = "mean"
    per: Literal["token", "sample"] = "token"


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """One unmasked loss value per local token; the kernel masks, weights and sums it."""

    values: Tensor
    """[N] float32, differentiable."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SampleIndex:
    """Which local token belongs to which sample, and how per-sample sums meet across context-parallel ranks."""

    mask: Tensor
    """[N] bool, trainable tokens."""
    sample_ids: Tensor
    """[N] int64 in [0, S)."""
    num_samples: int
    all_reduce: Callable[[Tensor], Tensor] | None = None
    """Differentiable sum of [S] values over the ranks that share these samples; None where one rank has it all."""

    def __post_init__(self) -> None:
        if self.mask.dtype != torch.bool or self.mask.dim() != 1 or self.sample_ids.shape != self.mask.shape:
            raise ValueError(
                f"expected a mask [N] of dtype bool and sample_ids [N], got {tuple(self.mask.shape)} {self.mask.dtype} "
                f"and {tuple(self.sample_ids.shape)}"
            )

    def per_sample(self, x: Tensor) -> Tensor:
        """Sum x [N] over the trainable tokens of each sample, wherever they lie: [S]."""
        x = torch.where(self.mask, x, x.new_zeros(()))
        total = x.new_zeros(self.num_samples).index_add(0, self.sample_ids, x)
        return total if self.all_reduce is None else self.all_reduce(total)

    def sample_sum(self, x: Tensor) -> Tensor:
        """Masked sum of x [N] over each whole sample, spread back to its tokens: [N]. Differentiable."""
        return self.per_sample(x)[self.sample_ids]

    def sample_mean(self, x: Tensor) -> Tensor:
        """Masked mean of x [N] over each whole sample, spread back to its tokens: [N]. Differentiable.

        Samples without a trainable token give 0.
        """
        count = self.per_sample(torch.ones_like(x, requires_grad=False)).clamp(min=1)
        return (self.per_sample(x) / count)[self.sample_ids]


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """What `policy_loss` is given; all tensors [N] float32 on the trainer's device."""

    log_probs: Tensor
    """Log-prob of each token under the policy being trained, of logits / temperature; differentiable."""
    old_log_probs: Tensor
    """The same when the rollout was made, by the trainer (detached)."""
    advantages: Tensor
    index: SampleIndex
    engine_log_probs: Tensor | None = None
    """What the engine said; equal to old_log_probs up to numerics."""
    ref_log_probs: Tensor | None = None
    teacher_log_probs: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """[N] bool, trainable tokens."""
        return self.index.mask

    def sample_sum(self, x: Tensor) -> Tensor:
        """Masked sum of x [N] over each whole sample, spread back to its tokens. Differentiable."""
        return self.index.sample_sum(x)

    def sample_mean(self, x: Tensor) -> Tensor:
        """Masked mean of x [N] over each whole sample, spread back to its tokens. Differentiable."""
        return self.index.sample_mean(x)


@dataclass(frozen=True, slots=True)
class ValueInputs:
    """What `value_loss` is given; all tensors [N] float32."""

    values: Tensor
    """Value read before each token, differentiable."""
    old_values: Tensor
    returns: Tensor
    value_clip: float
    index: SampleIndex


@dataclass(frozen=True, slots=True)
class Estimate:
    """What an advantage estimator returns; zero where not trainable."""

    advantages: Tensor
    """[N] float32."""
    returns: Tensor | None = None
    """[N] float32, what the critic is trained on."""


class AdvantageBatch:
    """A whole rollout for an advantage estimator: S ragged samples, N tokens, flat.

    Only the inputs that the estimator declared are there; reading another raises AttributeError.
    """

    rewards: Tensor
    """[S] float32, the outcome reward of each sample."""
    token_rewards: Tensor
    """[N] float32, zero where none was given."""
    values: Tensor
    """[N] float32, the critic's value read before each token."""
    log_probs: Tensor
    """[N] float32, the trainer's old log-probs."""
    ref_log_probs: Tensor
    """[N] float32."""

    def __init__(
        self, *, lengths: Tensor, mask: Tensor, groups: Tensor, rollouts: Tensor, inputs: Mapping[str, Tensor]
    ) -> None:
        self.lengths = lengths
        """[S] int64, tokens per sample; they sum to N."""
        self.mask = mask
        """[N] bool, trainable tokens."""
        self.groups = groups
        """[S] int64, samples of one prompt share one."""
        self.rollouts = rollouts
        """[S] int64, sequences of one rollout share one (and its reward)."""
        num_tokens, num_samples = check_flat(mask=mask), check_flat(lengths=lengths, groups=groups, rollouts=rollouts)
        check_ragged(lengths, num_tokens)
        for name, tensor in inputs.items():
            expected = num_samples if name == "rewards" else num_tokens
            if name not in ADVANTAGE_INPUTS or tensor.shape != (expected,):
                raise ValueError(
                    f"input {name!r} of shape {tuple(tensor.shape)} is not what an advantage batch has; expected one "
                    f"of {', '.join(ADVANTAGE_INPUTS)}, rewards of shape ({num_samples},), others ({num_tokens},)"
                )
        self.__dict__.update(inputs)

    def __getattr__(self, name: str) -> Tensor:
        raise AttributeError(
            f"{name!r} is not in this batch; declare it in AdvantageTraits(inputs=...) if the estimator needs it"
        )

    @property
    def sample_ids(self) -> Tensor:
        """[N] int64, the sample each token belongs to."""
        samples = torch.arange(len(self.lengths), device=self.lengths.device)
        return torch.repeat_interleave(samples, self.lengths, output_size=len(self.mask))

    def spread(self, x: Tensor) -> Tensor:
        """Give each trainable token its sample's value: x [S] to [N], zero where masked."""
        return torch.where(
            self.mask, torch.repeat_interleave(x, self.lengths, output_size=len(self.mask)), x.new_zeros(())
        )
