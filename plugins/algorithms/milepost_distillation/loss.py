"""Reverse KL from the teacher on the student's own samples (arXiv 2306.13649), as a policy gradient."""

from __future__ import annotations

from dataclasses import replace

from milepost.functional.kl import kl_divergence
from milepost.training.clipped import clipped_token_loss
from milepost.training.inputs import Metric, PolicyInputs, TokenLoss

from milepost_distillation import DistillationOptions


class Distillation:
    """PPO's clipped loss with A_t = log-prob(teacher) - log-prob(old), the negated KL estimate k1 of each token.

    On policy its expected gradient is that of KL(student || teacher) of the next token, at the prefixes that the
    student sampled. `reward_coef` adds that much of the advantage estimated from rewards.
    """

    def __init__(self, options: DistillationOptions) -> None:
        self.options = options

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        """Return the clipped loss of each token; `teacher_kl` is the mean estimate of KL(student || teacher).

        Raises:
            ValueError: there are no teacher log-probs.
        """
        teacher = inputs.teacher_log_probs
        if teacher is None:
            raise ValueError("distillation needs teacher log-probs, but none were given; set teacher.path")
        advantages = -kl_divergence(inputs.old_log_probs, teacher, "k1")
        if self.options.reward_coef:
            advantages = advantages + self.options.reward_coef * inputs.advantages
        loss = clipped_token_loss(replace(inputs, advantages=advantages), self.options)
        kl = kl_divergence(inputs.log_probs.detach(), teacher, "k1")
        return TokenLoss(loss.values, {**loss.metrics, "teacher_kl": Metric(kl)})
