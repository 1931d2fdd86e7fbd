"""The kernel's part of the loss, the same for every algorithm, and the sums its metrics are reduced with.

An algorithm returns one unmasked value per token. What multiplies, adds, masks, weighs and sums those values is here,
so that a rank's loss is sum(w x l) over its trainable tokens and no rank divides by anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from milepost.components import Algorithm, HasValueLoss
from milepost.config.schema import AlgorithmSection, Correction
from milepost.functional.checks import check_flat
from milepost.functional.kl import kl_divergence
from milepost.functional.ratios import importance_factor, log_prob_difference, mask_factor, ratio, truncate_factor
from milepost.functional.values import clipped_value_loss
from milepost.training.inputs import Metric, PolicyInputs, Reduction, SampleIndex, TokenLoss, ValueInputs

POLICY_METRICS = frozenset(
    {
        "loss",
        "pg_loss",
        "kl_loss",
        "entropy",
        "entropy_loss",
        "old_log_prob_diff",
        "log_prob_diff",
        "log_prob_diff_max",
        "correction_factor",
        "correction_clipfrac",
        "ratio_mean",
        "ratio_square",
    }
)
"""Names of the kernel's own policy metrics; an algorithm may not use them."""
VALUE_METRICS = frozenset({"loss", "value_loss", "values", "returns"})
"""Names of the kernel's own critic metrics."""


def policy_objective(
    algorithm: Algorithm,
    inputs: PolicyInputs,
    weights: Tensor,
    settings: AlgorithmSection,
    entropy: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """Sum over trainable tokens of w x (policy term x correction - entropy_coef x entropy + kl_loss_coef x KL).

    The algorithm sees zeros at masked tokens, whatever stood there, and no gradient flows to them. The correction
    (TIS or IcePop) is exp(trainer's old log-prob - engine's), detached; it multiplies the policy term alone and leaves
    the weights as they are.

    Args:
        algorithm: gives the policy term.
        inputs: one micro-batch, or this rank's part of it under context parallelism.
        weights: [N] float32, from `milepost.functional.aggregation.token_weights` over the whole optimizer step.
        settings: the kernel's keys of the algorithm section.
        entropy: [N], entropy of the policy at each token; differentiable where it has a coefficient.

    Returns:
        The loss (a scalar to call `backward` on; not yet summed over ranks) and its metrics, not yet reduced: `loss`,
        `pg_loss`, `kl_loss`, `entropy_loss` are token-weighted sums (the last two without their coefficient);
        `entropy`, `log_prob_diff` (|engine - trainer|), `correction_*`, `ratio_mean` and `ratio_square` (the ratio of
        a token and its square, of which the effective sample size is made) are means over tokens, `log_prob_diff_max`
        and `old_log_prob_diff` (how far the log-probs lie from the old ones) maxima; and the algorithm's own.

    Raises:
        ValueError: shapes disagree, a coefficient or correction is set whose input is missing, or the algorithm
            returned something else than it promised.
    """
    check_flat(
        log_probs=inputs.log_probs,
        old_log_probs=inputs.old_log_probs,
        advantages=inputs.advantages,
        mask=inputs.mask,
        weights=weights,
        engine_log_probs=inputs.engine_log_probs,
        ref_log_probs=inputs.ref_log_probs,
        teacher_log_probs=inputs.teacher_log_probs,
        entropy=entropy,
    )
    inputs = _masked_policy_inputs(inputs)
    mask = inputs.mask
    weights = _zero_masked(weights, mask)
    token_loss = algorithm.policy_loss(inputs)
    metrics = _algorithm_metrics(token_loss, inputs.index, POLICY_METRICS)
    policy_term = token_loss.values
    metrics["old_log_prob_diff"] = Metric((inputs.log_probs.detach() - inputs.old_log_probs).abs(), "max")
    rho = ratio(log_prob_difference(inputs.old_log_probs, inputs.log_probs.detach()))
    metrics["ratio_mean"] = Metric(rho)
    metrics["ratio_square"] = Metric(rho.square())
    if inputs.engine_log_probs is not None:
        difference = (inputs.engine_log_probs - inputs.old_log_probs).abs()
        metrics["log_prob_diff"] = Metric(difference)
        metrics["log_prob_diff_max"] = Metric(difference, "max")
    if settings.correction is not None:
        factor, outside = _correction(settings.correction, inputs)
        policy_term = policy_term * factor
        metrics["correction_factor"] = Metric(factor)
        metrics["correction_clipfrac"] = Metric(outside)
    policy_term = _zero_masked(policy_term, mask)
    total = policy_term
    metrics["pg_loss"] = _weighted(weights, policy_term)
    if settings.entropy_coef != 0.0 and entropy is None:
        raise ValueError(f"entropy_coef is {settings.entropy_coef}, but no entropy was given; compute it, or set it 0")
    if entropy is not None:
        entropy = _zero_masked(entropy, mask)
        metrics["entropy"] = Metric(entropy.detach())
        metrics["entropy_loss"] = _weighted(weights, entropy)
        if settings.entropy_coef != 0.0:
            total = total - settings.entropy_coef * entropy
    if settings.kl_loss_coef != 0.0 and inputs.ref_log_probs is None:
        raise ValueError(
            f"kl_loss_coef is {settings.kl_loss_coef}, but no reference log-probs were given; compute them, or set it 0"
        )
    if inputs.ref_log_probs is not None:
        kl = kl_divergence(inputs.log_probs, inputs.ref_log_probs, settings.kl_loss_type)
        metrics["kl_loss"] = _weighted(weights, kl)
        if settings.kl_loss_coef != 0.0:
            total = total + settings.kl_loss_coef * kl
    metrics["loss"] = _weighted(weights, total)
    return (weights * total).sum(), metrics


def value_objective(
    algorithm: Algorithm | HasValueLoss, inputs: ValueInputs, weights: Tensor
) -> tuple[Tensor, dict[str, Metric]]:
    """Sum over trainable tokens of w x the critic's loss: the algorithm's own, or the clipped one without factor 1/2.

    Args:
        algorithm: may have a `value_loss`.
        inputs: one micro-batch, or this rank's part of it under context parallelism.
        weights: [N] float32, the policy's token weights.

    Returns:
        The loss (a scalar to call `backward` on; not yet summed over ranks) and its metrics, not yet reduced: `loss`
        and `value_loss` (the same token-weighted sum), means of `values` and `returns`, and the algorithm's own
        (`value_clipfrac` of the default loss).

    Raises:
        ValueError: shapes disagree, or the algorithm returned something else than it promised.
    """
    check_flat(
        values=inputs.values,
        old_values=inputs.old_values,
        returns=inputs.returns,
        mask=inputs.index.mask,
        weights=weights,
    )
    mask = inputs.index.mask
    inputs = replace(
        inputs,
        values=_zero_masked(inputs.values, mask),
        old_values=_zero_masked(inputs.old_values.detach(), mask),
        returns=_zero_masked(inputs.returns.detach(), mask),
    )
    weights = _zero_masked(weights, mask)
    token_loss = algorithm.value_loss(inputs) if isinstance(algorithm, HasValueLoss) else _default_value_loss(inputs)
    metrics = _algorithm_metrics(token_loss, inputs.index, VALUE_METRICS)
    values = _zero_masked(token_loss.values, mask)
    metrics["values"] = Metric(inputs.values.detach())
    metrics["returns"] = Metric(inputs.returns)
    metrics["loss"] = metrics["value_loss"] = _weighted(weights, values)
    return (weights * values).sum(), metrics


def _default_value_loss(inputs: ValueInputs) -> TokenLoss:
    """PPO's clipped value loss, for algorithms that bring none."""
    loss = clipped_value_loss(inputs.values, inputs.old_values, inputs.returns, inputs.value_clip)
    moved = (inputs.values.detach() - inputs.old_values).abs() > inputs.value_clip
    return TokenLoss(loss, {"value_clipfrac": Metric(moved.float())})


def _zero_masked(x: Tensor, mask: Tensor) -> Tensor:
    """Zero x [N] where masked, by selection: NaN times 0 is NaN, forwards and backwards."""
    return torch.where(mask, x, x.new_zeros(()))


def _masked_policy_inputs(inputs: PolicyInputs) -> PolicyInputs:
    """Zero every input where masked; only the log-probs keep their gradient."""
    mask = inputs.mask

    def fixed(x: Tensor | None) -> Tensor | None:
        return None if x is None else _zero_masked(x.detach(), mask)

    return replace(
        inputs,
        log_probs=_zero_masked(inputs.log_probs, mask),
        old_log_probs=_zero_masked(inputs.old_log_probs.detach(), mask),
        advantages=_zero_masked(inputs.advantages.detach(), mask),
        engine_log_probs=fixed(inputs.engine_log_probs),
        ref_log_probs=fixed(inputs.ref_log_probs),
        teacher_log_probs=fixed(inputs.teacher_log_probs),
    )


def _correction(correction: Correction, inputs: PolicyInputs) -> tuple[Tensor, Tensor]:
    """Return the factor [N] of the policy term, and 1.0 at tokens [N] where the bounds changed it."""
    if inputs.engine_log_probs is None:
        raise ValueError(
            f"correction {correction.name!r} compares with the engine's log-probs, but none were given; "
            "have the engine report them, or remove the correction"
        )
    raw = importance_factor(inputs.old_log_probs, inputs.engine_log_probs)
    bound = truncate_factor if correction.name == "tis" else mask_factor
    factor = bound(raw, correction.low, correction.high)
    return factor, (factor != raw).to(raw.dtype)


def _weighted(weights: Tensor, x: Tensor) -> Metric:
    """The token-weighted sum of x [N], as the loss has it."""
    return Metric((weights * x).detach(), "sum")


def _algorithm_metrics(loss: TokenLoss, index: SampleIndex, reserved: frozenset[str]) -> dict[str, Metric]:
    """Check what an algorithm returned and take its metrics over, without their gradients."""
    num_tokens = len(index.mask)
    if loss.values.shape != (num_tokens,):
        raise ValueError(
            f"the algorithm returned losses of shape {tuple(loss.values.shape)}, expected one per token "
            f"({num_tokens},); leave masking, weighing and summing to the kernel"
        )
    taken = sorted(reserved & loss.metrics.keys())
    if taken:
        raise ValueError(f"the algorithm reports {', '.join(taken)}, which the kernel reports itself; rename it")
    metrics = {}
    for name, metric in loss.metrics.items():
        expected = num_tokens if metric.per == "token" else index.num_samples
        if metric.values.shape != (expected,):
            raise ValueError(
                f"metric {name!r} has shape {tuple(metric.values.shape)}, expected one value per {metric.per} "
                f"({expected},); give unreduced values and let `reduction` say how they become one"
            )
        metrics[name] = replace(metric, values=metric.values.detach())
    return metrics


class MetricState(NamedTuple):
    """What `MetricSums` has gathered, as flat tensors that ranks can all-reduce: sum, max and min respectively."""

    sums: Tensor
    """float64: trainable tokens, samples, then one sum per `mean` and `sum` metric in order of name."""
    maxes: Tensor
    """float64, one per `max` metric in order of name."""
    mins: Tensor
    """float64, one per `min` metric in order of name."""


class MetricSums:
    """Gathers metrics over the micro-batches of an optimizer step, and over ranks, without a device synchronisation.

    Every rank of the data-parallel and context-parallel group adds the same metrics, at least once: filler
    micro-batches too. Then ranks all-reduce the three tensors of `state()` by sum, max and min and `load()` them.
    Ranks that hold copies of the same tokens (tensor parallel) do not take part in that.

    Args:
        context_parallel: ranks that share each sample. All of them have each per-sample value, which counts once.
    """

    def __init__(self, context_parallel: int = 1) -> None:
        if context_parallel < 1:
            raise ValueError(f"context_parallel is {context_parallel}, expected 1 or more")
        self._share = 1.0 / context_parallel
        self._kinds: dict[str, tuple[Reduction, Literal["token", "sample"]]] = {}
        self._state: MetricState | None = None

    def add(self, metrics: Mapping[str, Metric], index: SampleIndex) -> None:
        """Add the metrics of one micro-batch.

        Samples without a trainable token (filler) do not count in per-sample metrics. With per-sample metrics this
        calls `index.all_reduce`, on all ranks that share the samples alike.

        Raises:
            ValueError: other metrics than were added before.
        """
        kinds = {name: (metrics[name].reduction, metrics[name].per) for name in sorted(metrics)}
        if self._state is not None and kinds != self._kinds:
            differing = sorted(kinds.items() ^ self._kinds.items())
            raise ValueError(
                f"this micro-batch has other metrics than those before: {differing}; "
                "an algorithm reports the same metrics every time"
            )
        self._kinds = kinds
        token_mask = index.mask
        if any(per == "sample" for _, per in kinds.values()):
            with torch.no_grad():
                sample_mask = index.per_sample(torch.ones_like(token_mask, dtype=torch.float32)) > 0
        else:
            sample_mask = token_mask.new_zeros(0)
        masks = {"token": token_mask, "sample": sample_mask}
        shares = {"token": 1.0, "sample": self._share}
        sums = [masks[per].sum(dtype=torch.float64) * shares[per] for per in ("token", "sample")]
        maxes, mins = [], []
        for name, (reduction, per) in kinds.items():
            values, mask = metrics[name].values.detach(), masks[per]
            if reduction in ("mean", "sum"):
                sums.append(_zero_masked(values, mask).sum(dtype=torch.float64) * shares[per])
            elif reduction == "max":
                maxes.append(_extreme(values, mask, -torch.inf).max())
            else:
                mins.append(_extreme(values, mask, torch.inf).min())
        empty = token_mask.new_zeros(0, dtype=torch.float64)
        new = MetricState(torch.stack(sums), *(torch.stack(part) if part else empty for part in (maxes, mins)))
        if self._state is not None:
            old = self._state
            new = MetricState(
                old.sums + new.sums, torch.maximum(old.maxes, new.maxes), torch.minimum(old.mins, new.mins)
            )
        self._state = new

    def state(self) -> MetricState:
        """What was gathered so far, for ranks to all-reduce. Raises ValueError if nothing was."""
        if self._state is None:
            raise ValueError("no metrics were added; every rank adds those of at least one micro-batch, filler too")
        return self._state

    def load(self, state: tuple[Tensor, Tensor, Tensor]) -> None:
        """Take over what `state()` gave, reduced over ranks. Raises ValueError if it is of other metrics."""
        loaded = MetricState(*state)
        expected = [part.shape for part in self.state()]
        if [part.shape for part in loaded] != expected:
            raise ValueError(f"expected a state of shapes {expected}, got {[part.shape for part in loaded]}")
        self._state = loaded

    def result(self) -> dict[str, float]:
        """Reduce to one number per metric, in order of name, with one transfer to the host.

        A mean, max or min over nothing is left out. Raises ValueError if nothing was added.
        """
        state = self.state()
        numbers = iter(torch.cat(state).tolist())
        counts = {"token": next(numbers), "sample": next(numbers)}
        reductions: tuple[tuple[str, ...], ...] = (("mean", "sum"), ("max",), ("min",))
        result = {}
        for part in reductions:
            for name, (reduction, per) in self._kinds.items():
                if reduction in part:
                    number = next(numbers)
                    if reduction == "sum":
                        result[name] = number
                    elif counts[per] > 0:
                        result[name] = number / counts[per] if reduction == "mean" else number
        return dict(sorted(result.items()))


def _extreme(values: Tensor, mask: Tensor, fill: float) -> Tensor:
    """Values where the mask holds and `fill` elsewhere, float64, with one `fill` more so that it is never empty."""
    kept = torch.where(mask, values.double(), fill)
    return torch.cat([kept, kept.new_full((1,), fill)])
