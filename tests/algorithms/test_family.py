"""Every algorithm through the registry and the kernel, against an independent program: plain loops in float64."""

import itertools
import math
import random

import pytest
import torch
from milepost.config.schema import AlgorithmSection
from milepost.functional.aggregation import token_weights
from milepost.functional.ratios import effective_sample_size
from milepost.registry import current, resolve
from milepost.testing import check_algorithm
from milepost.training.inputs import PolicyInputs, SampleIndex
from milepost.training.losses import MetricSums, policy_objective

LENGTHS = [5, 1, 17, 8, 30, 3, 12]
CONSTANT = 16.0
CLIPPED = ("ppo", "dr_grpo", "dapo", "rloo", "reinforce_pp")
CASES = (
    *(
        (name, options)
        for name in CLIPPED
        for options in ({}, {"eps_clip": 0.1, "eps_clip_high": 0.3, "dual_clip": 1.5})
    ),
    ("gspo", {}),
    ("gspo", {"eps_clip": 0.05, "eps_clip_high": 0.1}),
    ("cispo", {}),
    ("cispo", {"eps_clip": 0.2, "eps_clip_high": None}),
    ("distillation", {}),
    ("distillation", {"reward_coef": 0.5, "eps_clip_high": 0.4, "dual_clip": 3.0}),
)
DEFAULT_BOUNDS = {"dapo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 0.28)}


def clamp(x, low, high):
    return max(low, min(x, high))


def bounds(name, options):
    low, high = DEFAULT_BOUNDS.get(name, (0.2, None))
    low, high = options.get("eps_clip", low), options.get("eps_clip_high", high)
    return 1 - low, 1 + (low if high is None else high)


def plain_clip(rho, advantage, low, high, dual):
    """The clipped loss of one token and its derivative by log(rho)."""
    value, slope = -rho * advantage, -rho * advantage
    bounded = -clamp(rho, low, high) * advantage
    if bounded > value:
        value, slope = bounded, 0.0
    if dual is not None and advantage < 0 and value > -dual * advantage:
        value, slope = -dual * advantage, 0.0
    return value, slope


def plain_weights(mask, kind):
    total, batch = sum(sum(sample) for sample in mask), len(mask)
    result = []
    for sample in mask:
        count = sum(sample)
        share = {"sample_mean": 1 / max(count, 1) / batch, "token_mean": 1 / total, "constant": 1 / (batch * CONSTANT)}
        result.append([share[kind] if trainable else 0.0 for trainable in sample])
    return result


def plain(name, options, samples, weights):
    """Loss and its derivative by every log-prob, sample by sample and token by token."""
    low, high = bounds(name, options)
    dual = options.get("dual_clip")
    loss, gradient = 0.0, []
    for sample, w in zip(samples, weights, strict=True):
        trained = [t for t in range(len(w)) if w[t]]
        slopes = [0.0] * len(w)
        new, old, advantages = sample["log_probs"], sample["old_log_probs"], list(sample["advantages"])
        if name == "distillation":
            teacher, coef = sample["teacher_log_probs"], options.get("reward_coef", 0.0)
            advantages = [teacher[t] - old[t] + coef * advantages[t] for t in range(len(w))]
        if name == "gspo" and trained:
            rho = math.exp(sum(new[t] - old[t] for t in trained) / len(trained))
            for t in trained:
                value, slope = plain_clip(rho, advantages[t], low, high, None)
                loss += w[t] * value
                for other in trained:
                    slopes[other] += w[t] * slope / len(trained)
        elif name == "cispo":
            for t in trained:
                rho = clamp(math.exp(new[t] - old[t]), low, high)
                loss -= w[t] * rho * advantages[t] * new[t]
                slopes[t] = -w[t] * rho * advantages[t]
        else:
            for t in trained:
                value, slope = plain_clip(math.exp(new[t] - old[t]), advantages[t], low, high, dual)
                loss += w[t] * value
                slopes[t] = w[t] * slope
        gradient.append(slopes)
    return loss, gradient


def random_batch(seed):
    """Samples of float32 numbers as Python floats, and their masks; one sample has no trainable token."""
    rng = random.Random(seed)

    def column(make, length):
        return torch.tensor([make() for _ in range(length)]).double().tolist()

    samples = []
    for length in LENGTHS:
        new = column(lambda: -rng.expovariate(1.0), length)
        near = iter(new)
        samples.append(
            {
                "log_probs": new,
                "old_log_probs": torch.tensor([x + rng.gauss(0, 0.4) for x in new]).double().tolist(),
                "teacher_log_probs": torch.tensor([next(near) + rng.gauss(0, 1.0) for _ in new]).double().tolist(),
                "advantages": column(lambda: rng.gauss(0, 1), length),
            }
        )
    mask = [[rng.random() < 0.7 for _ in range(length)] for length in LENGTHS]
    mask[1] = [False]
    return samples, mask


def run(name, options, samples, mask, kind, micro_batches):
    """Loss and gradient by the product, in the given micro-batches of samples."""
    algorithm = resolve("algorithm", name, options)
    lengths = torch.tensor(LENGTHS)
    flat = torch.tensor([flag for sample in mask for flag in sample])
    weights = token_weights(flat, lengths, torch.arange(len(LENGTHS)), aggregation=kind, constant=CONSTANT)
    weights = weights.split(LENGTHS)
    leaves = [torch.tensor(sample["log_probs"]).requires_grad_() for sample in samples]
    total, sums = 0.0, MetricSums()
    for chosen in micro_batches:
        columns = {
            key: torch.cat([torch.tensor(samples[i][key]) for i in chosen])
            for key in ("old_log_probs", "advantages", "teacher_log_probs")
        }
        if name != "distillation":
            columns.pop("teacher_log_probs")
        ids = torch.cat([torch.full((LENGTHS[i],), place) for place, i in enumerate(chosen)])
        index = SampleIndex(torch.tensor([flag for i in chosen for flag in mask[i]]), ids, len(chosen))
        inputs = PolicyInputs(torch.cat([leaves[i] for i in chosen]), index=index, **columns)
        section = AlgorithmSection(name=name)
        loss, metrics = policy_objective(algorithm, inputs, torch.cat([weights[i] for i in chosen]), section)
        loss.backward()
        sums.add(metrics, index)
        total += loss.item()
    return total, torch.cat([leaf.grad for leaf in leaves]).double(), sums.result()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_gradient_equals_an_independent_program_however_it_is_split(name, options):
    count = len(LENGTHS)
    splits = ([list(range(count))], [[i] for i in range(count)], [[6, 2, 0], [5, 4, 3, 1]])
    for seed, kind in itertools.product(range(3), ("sample_mean", "token_mean", "constant")):
        samples, mask = random_batch(seed)
        expected_loss, expected = plain(name, options, samples, plain_weights(mask, kind))
        reference = torch.tensor([slope for sample in expected for slope in sample], dtype=torch.float64)
        for micro_batches in splits:
            loss, gradient, _ = run(name, options, samples, mask, kind, micro_batches)
            assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
            error = (gradient - reference).norm() / reference.norm()
            assert error < 1e-5, (kind, micro_batches, float(error))


@pytest.mark.parametrize(("name", "options"), CASES)
def test_keeps_every_promise(name, options):
    assert check_algorithm(name, options) == []


@pytest.mark.parametrize(
    ("name", "advantage", "aggregation", "group", "critic", "teacher"),
    [
        ("ppo", "gae", "sample_mean", False, True, False),
        ("dr_grpo", "group", "constant", True, False, False),
        ("dapo", "group", "token_mean", True, False, False),
        ("gspo", "group", "sample_mean", True, False, False),
        ("cispo", "group", "token_mean", True, False, False),
        ("rloo", "rloo", "token_mean", True, False, False),
        ("reinforce_pp", "reinforce_pp", "token_mean", False, False, False),
        ("distillation", "raw", "token_mean", False, False, True),
    ],
)
def test_traits(name, advantage, aggregation, group, critic, teacher):
    traits = current().get("algorithm", name).component.traits
    assert (traits.advantage, traits.aggregation) == (advantage, aggregation)
    assert (traits.group, traits.critic, traits.teacher, traits.reference) == (group, critic, teacher, False)


def one_sample(mask, **columns):
    """Inputs of one sample, the log-probs a leaf, and its index."""
    tensors = {name: torch.tensor(column) for name, column in columns.items()}
    leaf = tensors.pop("log_probs").requires_grad_()
    index = SampleIndex(torch.tensor(mask, dtype=torch.bool), torch.zeros(len(mask), dtype=torch.int64), 1)
    return PolicyInputs(leaf, index=index, **tensors)


def test_golden_dual_clip():
    rho = [2.0, 2.0, 0.5]
    inputs = one_sample(
        [1, 1, 1], log_probs=[math.log(x) for x in rho], old_log_probs=[0.0] * 3, advantages=[2.0, -2.0, 2.0]
    )
    for name in CLIPPED:
        algorithm = resolve("algorithm", name, {"eps_clip": 0.2, "eps_clip_high": 0.2, "dual_clip": 1.5})
        loss = algorithm.policy_loss(inputs)
        assert loss.values.tolist() == pytest.approx([-2.4, 3.0, -1.0], rel=1e-6)
        assert loss.metrics["pg_clipfrac"].values.tolist() == [1.0, 0.0, 0.0]
        assert loss.metrics["pg_dual_clipfrac"].values.tolist() == [0.0, 1.0, 0.0]


def test_golden_cispo():
    rho, log_probs = [1.0, 1.14, 1.56, 0.4], [-0.7, -1.2, -0.4, -2.1]
    inputs = one_sample(
        [1] * 4,
        log_probs=log_probs,
        old_log_probs=[x - math.log(r) for x, r in zip(log_probs, rho, strict=True)],
        advantages=[1.0, -0.5, 2.0, -1.0],
    )
    loss = resolve("algorithm", "cispo", {"eps_clip": 0.2, "eps_clip_high": 0.28}).policy_loss(inputs)
    assert loss.values.tolist() == pytest.approx([0.7, -0.684, 1.024, -1.68], rel=1e-5)
    assert loss.metrics["pg_clipfrac"].values.tolist() == [0.0, 0.0, 1.0, 1.0]
    loss.values.sum().backward()
    # -clip(rho) A, as if the ratio were a number
    assert inputs.log_probs.grad.tolist() == pytest.approx([-1.0, 0.57, -2.56, 0.8], rel=1e-5)


def test_golden_gspo():
    d = [0.2, -0.1, 9.0, 0.2]
    inputs = one_sample([1, 1, 0, 1], log_probs=[-x for x in d], old_log_probs=[0.0] * 4, advantages=[1.0] * 4)
    # bounds wide enough not to clip
    algorithm = resolve("algorithm", "gspo", {"eps_clip": 0.2, "eps_clip_high": 0.2})
    loss, metrics = policy_objective(algorithm, inputs, torch.full((4,), 1 / 3), AlgorithmSection(name="gspo"))
    loss.backward()
    assert loss.item() == pytest.approx(-0.904837, abs=1e-6)
    assert inputs.log_probs.grad.tolist() == pytest.approx([-0.301612, -0.301612, 0.0, -0.301612], abs=1e-6)
    sums = MetricSums()
    sums.add(metrics, inputs.index)
    assert sums.result()["ratio_max"] == pytest.approx(0.904837, abs=1e-6)
    # with its own bounds a ratio of 0.90 is far below, and a positive advantage still pulls it up
    assert resolve("algorithm", "gspo").policy_loss(inputs).metrics["pg_clipfrac"].values.sum() == 0
    below = one_sample([1, 1], log_probs=[-0.1, -0.1], old_log_probs=[0.0, 0.0], advantages=[-1.0, -1.0])
    clipped = resolve("algorithm", "gspo").policy_loss(below)
    assert clipped.metrics["pg_clipfrac"].values.tolist() == [1.0, 1.0]
    assert clipped.values.tolist() == pytest.approx([0.9997, 0.9997], rel=1e-6)


def test_dapo_lets_unlikely_tokens_grow_further_than_ppo():
    inputs = one_sample([1], log_probs=[math.log(1.25)], old_log_probs=[0.0], advantages=[1.0])
    assert resolve("algorithm", "ppo").policy_loss(inputs).values.item() == pytest.approx(-1.2)
    assert resolve("algorithm", "dapo").policy_loss(inputs).values.item() == pytest.approx(-1.25)
    assert resolve("algorithm", "dapo", {"eps_clip_high": None}).policy_loss(inputs).values.item() == pytest.approx(
        -1.2
    )


def test_distillation_pulls_towards_the_teacher_alone_unless_asked():
    columns = {"log_probs": [-1.0, -1.0], "old_log_probs": [-1.0, -1.0], "advantages": [5.0, 5.0]}
    inputs = one_sample([1, 1], teacher_log_probs=[-0.5, -3.0], **columns)
    loss = resolve("algorithm", "distillation").policy_loss(inputs)
    loss.values.sum().backward()
    assert inputs.log_probs.grad.tolist() == pytest.approx([-0.5, 2.0])
    assert loss.metrics["teacher_kl"].values.tolist() == pytest.approx([-0.5, 2.0])
    with_reward = resolve("algorithm", "distillation", {"reward_coef": 0.1}).policy_loss(inputs)
    assert with_reward.values.tolist() == pytest.approx([-1.0, 1.5])
    with pytest.raises(ValueError, match=r"set teacher\.path"):
        resolve("algorithm", "distillation").policy_loss(one_sample([1, 1], **columns))


@pytest.mark.parametrize("name", [*CLIPPED, "gspo", "cispo"])
def test_log_probs_far_apart_or_not_finite_give_finite_losses(name):
    d = [-1000.0, 1000.0, math.nan, math.inf, -math.inf]
    inputs = one_sample([1] * 5, log_probs=[0.0] * 5, old_log_probs=d, advantages=[0.0] * 5)
    loss = resolve("algorithm", name).policy_loss(inputs)
    assert loss.values.tolist() == [0.0] * 5
    loss.values.sum().backward()
    assert inputs.log_probs.grad.tolist() == [0.0] * 5


def test_ratio_sums_give_the_effective_sample_size():
    samples, mask = random_batch(0)
    *_, metrics = run("ppo", {}, samples, mask, "sample_mean", [[0, 1, 2], [3, 4, 5, 6]])
    flat = torch.tensor([flag for sample in mask for flag in sample])
    d = [n - o for s in samples for n, o in zip(s["log_probs"], s["old_log_probs"], strict=True)]
    expected = effective_sample_size(torch.tensor(d).exp(), flat)
    assert metrics["ratio_mean"] ** 2 / metrics["ratio_square"] == pytest.approx(expected, rel=1e-5)
