"""The algorithm checks: what keeps its promises passes, and every way of breaking one is caught by name."""

import itertools

import pytest
import torch
from milepost.components import AlgorithmTraits, Component, Options
from milepost.functional.clipping import cispo_loss, clipped_policy_loss
from milepost.functional.ratios import log_prob_difference, ratio, sequence_difference
from milepost.functional.values import clipped_value_loss
from milepost.testing import check_algorithm
from milepost.testing.context_parallel import UnequalCallsError, run_pair, zigzag
from milepost.training.inputs import Metric, TokenLoss

CALLS = itertools.count(1)


class Algorithm:
    """A clipped objective made from a function of the inputs."""

    def __init__(self, function):
        self.function = function

    def policy_loss(self, inputs):
        result = self.function(inputs)
        return result if isinstance(result, TokenLoss) else TokenLoss(result)


def rho(inputs):
    return ratio(log_prob_difference(inputs.old_log_probs, inputs.log_probs))


def ppo(inputs):
    return clipped_policy_loss(rho(inputs), inputs.advantages, 0.2, 0.2).values


def gspo(inputs):
    difference = log_prob_difference(inputs.old_log_probs, inputs.log_probs)
    sequence = ratio(sequence_difference(difference, inputs.sample_mean))
    metrics = {
        "ratio_max": Metric(sequence, "max"),
        "length": Metric(inputs.index.per_sample(torch.ones_like(difference)), "mean", per="sample"),
        "tokens": Metric(inputs.index.per_sample(torch.ones_like(difference)), "sum", per="sample"),
    }
    return TokenLoss(clipped_policy_loss(sequence, inputs.advantages, 0.2, 0.2).values, metrics)


def cispo(inputs):
    return cispo_loss(rho(inputs), inputs.advantages, inputs.log_probs, 0.2, 0.28)


@pytest.mark.parametrize("function", [ppo, gspo, cispo])
def test_sound_algorithms_pass(function):
    assert check_algorithm(Algorithm(function)) == []


def own_sample_mean(inputs):
    """Means over the local tokens of a sample only, so each half of a sample has a mean of its own."""
    index = inputs.index
    difference = torch.where(inputs.mask, log_prob_difference(inputs.old_log_probs, inputs.log_probs), 0.0)
    zeros = torch.zeros(index.num_samples)
    total = zeros.index_add(0, index.sample_ids, difference)
    count = zeros.index_add(0, index.sample_ids, inputs.mask.float()).clamp(min=1)
    return -ratio((total / count)[index.sample_ids]) * inputs.advantages


def whitened_in_the_micro_batch(inputs):
    advantages = inputs.advantages - inputs.advantages[inputs.mask].mean()
    return -rho(inputs) * advantages


def order_dependent(inputs):
    return ppo(inputs) * (1 + 0.1 * torch.arange(len(inputs.mask)))


def counts_masked_tokens(inputs):
    lengths = torch.bincount(inputs.index.sample_ids, minlength=inputs.index.num_samples)
    return ppo(inputs) * lengths[inputs.index.sample_ids]


def reads_masked_tokens(inputs):
    index = inputs.index
    total = torch.zeros(index.num_samples).index_add(0, index.sample_ids, inputs.log_probs)
    return -total[index.sample_ids] * inputs.advantages


def unbounded_ratio(inputs):
    return -torch.exp(inputs.log_probs - inputs.old_log_probs) * inputs.advantages


def off_by_a_little(inputs):
    shifted = ratio(log_prob_difference(inputs.old_log_probs, inputs.log_probs) + 1e-4)
    return TokenLoss(-shifted * inputs.advantages, {"ratio": Metric(shifted)})


def pulls_towards_old(inputs):
    return ppo(inputs) + 0.1 * (inputs.log_probs - inputs.old_log_probs).square()


def detached(inputs):
    return ppo(inputs).detach()


def reduced(inputs):
    return ppo(inputs).mean()


def reduced_metric(inputs):
    return TokenLoss(ppo(inputs), {"mine": Metric(rho(inputs).mean())})


def impure_values(inputs):
    return ppo(inputs) * next(CALLS)


def impure_inputs(inputs):
    loss = ppo(inputs)
    inputs.old_log_probs.add_(0.0).mul_(2.0)
    return -rho(inputs) * inputs.advantages + 0 * loss.detach()


def micro_batch_metric(inputs):
    """Reduces over the tokens it sees, so it cannot be reduced over the whole step any more."""
    highest = torch.where(inputs.mask, rho(inputs), 0.0).max()
    return TokenLoss(ppo(inputs), {"mine": Metric(highest.expand(len(inputs.mask)))})


def local_sample_metric(inputs):
    index = inputs.index
    ones = torch.where(inputs.mask, 1.0, 0.0)
    count = torch.zeros(index.num_samples).index_add(0, index.sample_ids, ones)
    return TokenLoss(ppo(inputs), {"mine": Metric(count, per="sample")})


def calls_as_often_as_it_has_tokens(inputs):
    for _ in range(len(inputs.mask)):
        inputs.sample_mean(inputs.log_probs)
    return ppo(inputs)


def raises(inputs):
    raise KeyError("nothing here")


@pytest.mark.parametrize(
    ("function", "promise"),
    [
        (own_sample_mean, "context-parallel invariance"),
        (whitened_in_the_micro_batch, "split invariance"),
        (order_dependent, "packing order"),
        (counts_masked_tokens, "padding"),
        (reads_masked_tokens, "masking"),
        (unbounded_ratio, "finite"),
        (off_by_a_little, "ratio 1 on policy"),
        (pulls_towards_old, "no gradient from zero advantages"),
        (detached, "one loss per token and unreduced metrics"),
        (reduced, "one loss per token and unreduced metrics"),
        (reduced_metric, "one loss per token and unreduced metrics"),
        (impure_values, "pure"),
        (impure_inputs, "pure"),
        (micro_batch_metric, "split invariance"),
        (local_sample_metric, "context-parallel invariance"),
        (calls_as_often_as_it_has_tokens, "context-parallel invariance"),
        (raises, "one loss per token and unreduced metrics"),
    ],
)
def test_every_broken_promise_is_caught(function, promise):
    findings = check_algorithm(Algorithm(function))
    assert promise in {finding.promise for finding in findings}


def test_a_flaw_that_only_context_parallelism_shows_is_reported_for_that_alone():
    findings = check_algorithm(Algorithm(own_sample_mean))
    assert {f.promise for f in findings} == {"context-parallel invariance"}
    assert "two ranks with a zig-zag half of each sample" in str(findings[0])


def test_a_constant_objective_is_no_objective():
    findings = check_algorithm(Algorithm(lambda inputs: 0.0 * inputs.log_probs))
    assert [f.promise for f in findings] == ["differentiable"]


def test_a_finding_says_what_was_tried_and_what_came():
    (finding,) = check_algorithm(Algorithm(reduced))
    assert finding.case == "policy_loss of 7 samples"
    assert finding.expected == "no exception"
    assert "losses of shape (), expected one per token" in finding.got


def test_an_objective_that_is_no_policy_gradient_may_say_so():
    distil = Algorithm(lambda inputs: (inputs.log_probs + 1.0).square())
    assert {f.promise for f in check_algorithm(distil)} == {"ratio 1 on policy", "no gradient from zero advantages"}
    assert check_algorithm(distil, policy_gradient=False) == []


class Clip(Options):
    eps: float = 0.2


def clip_component(model=Clip, traits=None):
    def build(options):
        return Algorithm(lambda inputs: clipped_policy_loss(rho(inputs), inputs.advantages, options.eps, 0.2).values)

    return Component("clip", model, traits or AlgorithmTraits(), build, "For tests.")


def test_a_component_with_options():
    assert check_algorithm(clip_component(), {"eps": 0.1}) == []


def test_options_that_do_not_pickle_are_caught():
    class Local(Options):
        eps: float = 0.2

    findings = check_algorithm(clip_component(Local))
    assert [f.promise for f in findings] == ["picklable options"]


def test_declared_roles_are_given():
    def build(options):
        return Algorithm(lambda inputs: inputs.log_probs - inputs.teacher_log_probs - inputs.ref_log_probs)

    traits = AlgorithmTraits(reference=True, teacher=True)
    assert check_algorithm(Component("distil", Clip, traits, build, "For tests.")) == []
    findings = check_algorithm(Component("distil", Clip, AlgorithmTraits(reference=True), build, "For tests."))
    assert "TypeError" in findings[0].got


def test_options_beside_an_object_are_refused():
    with pytest.raises(ValueError, match="build it with them, or name it"):
        check_algorithm(Algorithm(ppo), {"eps": 0.1})


class WithCritic(Algorithm):
    def value_loss(self, inputs):
        loss = clipped_value_loss(inputs.values, inputs.old_values, inputs.returns, inputs.value_clip)
        return TokenLoss(loss, {"error": Metric((inputs.values - inputs.returns).abs())})


class WithBrokenCritic(Algorithm):
    def value_loss(self, inputs):
        return TokenLoss((inputs.values - inputs.returns).square() / inputs.index.mask.sum())


def test_a_value_loss_is_checked_too():
    assert check_algorithm(WithCritic(ppo)) == []
    findings = check_algorithm(WithBrokenCritic(ppo))
    assert {"split invariance", "context-parallel invariance"} <= {f.promise for f in findings}
    assert all("value_loss" in finding.case for finding in findings)


def test_zigzag_shares_every_token_once():
    for num_tokens in range(10):
        first, second = zigzag(num_tokens)
        assert sorted([*first.tolist(), *second.tolist()]) == list(range(num_tokens))
    assert [part.tolist() for part in zigzag(8)] == [[0, 1, 6, 7], [2, 3, 4, 5]]


def test_the_simulated_sum_carries_gradients_to_both_ranks():
    leaves = [torch.tensor([2.0], requires_grad=True), torch.tensor([5.0], requires_grad=True)]
    losses = run_pair(lambda rank, all_reduce: (rank + 1) * all_reduce(leaves[rank]).square())
    assert [loss.item() for loss in losses] == [49.0, 98.0]
    (losses[0] + losses[1]).backward()
    # d/dx of (1 + 2) (x0 + x1)^2 = 6 x 7, on either side.
    assert [leaf.grad.tolist() for leaf in leaves] == [[42.0], [42.0]]


def test_a_rank_that_is_left_alone_says_so():
    def work(rank, all_reduce):
        x = torch.ones(1)
        return all_reduce(all_reduce(x)) if rank == 0 else all_reduce(x)

    with pytest.raises(UnequalCallsError, match="rank 0 summed over samples 2 times, rank 1 only 1 times"):
        run_pair(work)
