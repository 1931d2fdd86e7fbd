"""GRPO through the registry and the kernel, against an independent program: plain loops in float64."""

import itertools
import math
import random
import subprocess
import sys

import pytest
import torch
from milepost.config.schema import AlgorithmSection
from milepost.functional.aggregation import token_weights
from milepost.registry import current, resolve
from milepost.testing import check_algorithm
from milepost.training.inputs import PolicyInputs, SampleIndex
from milepost.training.losses import MetricSums, policy_objective

LENGTHS = [5, 1, 17, 8, 30, 3, 12]
ROLLOUTS = [0, 1, 2, 2, 3, 4, 5]
CONSTANT = 16.0


def clamp(x, low, high):
    return max(low, min(x, high))


def kl_and_derivative(x, kind):
    if kind == "k1":
        return x, 1.0
    if kind == "k2":
        return x * x / 2, x
    if kind == "k3":
        return math.exp(-x) - 1 + x, 1 - math.exp(-x)
    y = clamp(x, -20.0, 20.0)
    value = math.exp(-y) - 1 + y
    inside = -20.0 <= x <= 20.0 and value <= 10.0
    return min(value, 10.0), (1 - math.exp(-y)) if inside else 0.0


def plain_weights(mask, kind):
    """Weight of every token, straight from the definition."""
    counts, totals, weights = [], {}, []
    offset = 0
    for length, rollout in zip(LENGTHS, ROLLOUTS, strict=True):
        counts.append(sum(mask[offset : offset + length]))
        totals[rollout] = totals.get(rollout, 0) + counts[-1]
        offset += length
    batch = len(set(ROLLOUTS))
    position = 0
    for length, rollout in zip(LENGTHS, ROLLOUTS, strict=True):
        for _ in range(length):
            if not mask[position]:
                weights.append(0.0)
            elif kind == "sample_mean":
                weights.append(1.0 / totals[rollout] / batch)
            elif kind == "token_mean":
                weights.append(1.0 / sum(counts))
            else:
                weights.append(1.0 / (batch * CONSTANT))
            position += 1
    return weights


def plain_grpo(columns, weights, options, keys):
    """Loss and its derivative by every log-prob, one token at a time."""
    low, high = 1 - options["eps_clip"], 1 + options.get("eps_clip_high", options["eps_clip"])
    loss, gradient = 0.0, []
    for t, weight in enumerate(weights):
        if weight == 0.0:
            gradient.append(0.0)
            continue
        new, old, advantage = columns["log_probs"][t], columns["old_log_probs"][t], columns["advantages"][t]
        rho = math.exp(clamp(new - old, -20.0, 20.0))
        value, slope = -rho * advantage, -rho * advantage
        bounded = -clamp(rho, low, high) * advantage
        if bounded > value:
            value, slope = bounded, 0.0
        if "dual_clip" in options and advantage < 0 and value > -options["dual_clip"] * advantage:
            value, slope = -options["dual_clip"] * advantage, 0.0
        factor = 1.0
        if "correction" in keys:
            raw = math.exp(old - columns["engine_log_probs"][t])
            bounds = keys["correction"]["low"], keys["correction"]["high"]
            factor = clamp(raw, *bounds)
            if keys["correction"]["name"] == "icepop" and not bounds[0] <= raw <= bounds[1]:
                factor = 0.0
        kl, kl_slope = kl_and_derivative(new - columns["ref_log_probs"][t], keys["kl_loss_type"])
        loss += weight * (value * factor + keys["kl_loss_coef"] * kl)
        gradient.append(weight * (slope * factor + keys["kl_loss_coef"] * kl_slope))
    return loss, gradient


def random_columns(seed):
    rng = random.Random(seed)
    total = sum(LENGTHS)
    log_probs = [-rng.expovariate(1.0) for _ in range(total)]
    return {
        "log_probs": log_probs,
        "old_log_probs": [x + rng.gauss(0, 0.4) for x in log_probs],
        "engine_log_probs": [x + rng.gauss(0, 0.4) for x in log_probs],
        "ref_log_probs": [x + rng.gauss(0, 1.0) for x in log_probs],
        "advantages": [rng.gauss(0, 1) for _ in range(total)],
    }, [rng.random() < 0.7 for _ in range(total)]


OPTIONS = (
    {"eps_clip": 0.2},
    {"eps_clip": 0.2, "eps_clip_high": 0.28},
    {"eps_clip": 0.1, "dual_clip": 1.5},
)
CORRECTIONS = (
    {},
    {"correction": {"name": "tis", "low": 0.5, "high": 1.5}},
    {"correction": {"name": "icepop", "low": 0.5, "high": 1.5}},
)


@pytest.mark.parametrize("aggregation", ["sample_mean", "token_mean", "constant"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "low_var_kl"])
def test_gradient_equals_an_independent_program(kl, aggregation):
    for seed, (options, correction) in enumerate(itertools.product(OPTIONS, CORRECTIONS)):
        raw, mask = random_columns(seed)
        tensors = {name: torch.tensor(column) for name, column in raw.items()}
        columns = {name: tensor.double().tolist() for name, tensor in tensors.items()}
        keys = {"kl_loss_type": kl, "kl_loss_coef": 0.3, **correction}
        expected_loss, expected = plain_grpo(columns, plain_weights(mask, aggregation), options, keys)

        lengths = torch.tensor(LENGTHS)
        sample_ids = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)
        weights = token_weights(
            torch.tensor(mask), lengths, torch.tensor(ROLLOUTS), aggregation=aggregation, constant=CONSTANT
        )
        leaf = tensors.pop("log_probs").requires_grad_()
        inputs = PolicyInputs(leaf, index=SampleIndex(torch.tensor(mask), sample_ids, len(LENGTHS)), **tensors)
        settings = AlgorithmSection.model_validate({"name": "grpo", **keys})
        loss, _ = policy_objective(resolve("algorithm", "grpo", options), inputs, weights, settings)
        loss.backward()

        reference = torch.tensor(expected, dtype=torch.float64)
        assert leaf.grad is not None
        assert loss.item() == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
        error = (leaf.grad.double() - reference).norm() / reference.norm()
        assert error < 1e-5, (options, keys, float(error))


def test_metrics():
    index = SampleIndex(torch.tensor([True, True, True, True, False]), torch.zeros(5, dtype=torch.int64), 1)
    new = torch.log(torch.tensor([1.5, 0.5, 1.0, 4.0, 99.0])).requires_grad_()
    advantages = torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0])
    inputs = PolicyInputs(new, torch.zeros(5), advantages, index)
    settings = AlgorithmSection(name="grpo")
    algorithm = resolve("algorithm", "grpo", {"dual_clip": 3.0})
    _, metrics = policy_objective(algorithm, inputs, torch.full((5,), 0.25), settings)
    sums = MetricSums()
    sums.add(metrics, index)
    result = sums.result()
    assert result["pg_clipfrac"] == 0.25
    assert result["pg_dual_clipfrac"] == 0.25
    assert result["ratio_max"] == pytest.approx(4.0)
    assert result["ratio_min"] == pytest.approx(0.5)
    assert result["ppo_kl"] == pytest.approx(-math.log(1.5 * 0.5 * 4.0) / 4)
    assert result["pg_loss"] == pytest.approx(0.25 * (-1.2 - 0.5 - 1.0 + 3.0))


def test_metrics_without_a_dual_clip_do_not_speak_of_one():
    index = SampleIndex(torch.ones(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64), 1)
    inputs = PolicyInputs(torch.zeros(1, requires_grad=True), torch.zeros(1), torch.ones(1), index)
    loss = resolve("algorithm", "grpo").policy_loss(inputs)
    assert set(loss.metrics) == {"pg_clipfrac", "ppo_kl", "ratio_max", "ratio_min"}


@pytest.mark.parametrize("options", [{}, *OPTIONS])
def test_keeps_every_promise(options):
    assert check_algorithm("grpo", options) == []


def test_traits():
    traits = current().get("algorithm", "grpo").component.traits
    assert (traits.group, traits.advantage, traits.aggregation) == (True, "group", "sample_mean")
    assert not (traits.critic or traits.reference or traits.teacher)


@pytest.mark.parametrize("module", ["milepost_grpo", "milepost_group"])
def test_the_entry_point_is_light(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'numpy', 'transformers', 'ray') if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
