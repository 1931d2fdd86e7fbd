"""The advantage checks: what keeps its promises passes, and every way of breaking one is caught by name."""

import itertools

import pytest
import torch
from milepost.components import AdvantageTraits, Component, NoOptions, Options
from milepost.functional.gae import gae, reinforce_returns
from milepost.functional.group import group_advantages, leave_one_out_advantages
from milepost.functional.kl import kl_divergence
from milepost.functional.reinforce import baseline_advantages
from milepost.functional.whitening import whiten
from milepost.testing import check_advantage
from milepost.training.inputs import Estimate

CALLS = itertools.count(1)
GROUP = AdvantageTraits(group=True)
VALUES = AdvantageTraits(inputs=frozenset({"rewards", "token_rewards", "values"}), returns=True)
KL = AdvantageTraits(inputs=frozenset({"rewards", "log_probs", "ref_log_probs"}))


class Estimator:
    """An estimator made from a function of the batch."""

    def __init__(self, function):
        self.function = function

    def estimate(self, batch):
        result = self.function(batch)
        return result if isinstance(result, Estimate) else Estimate(result)


def grpo(batch):
    return batch.spread(group_advantages(batch.rewards, batch.groups, batch.rollouts))


def rloo(batch):
    return batch.spread(leave_one_out_advantages(batch.rewards, batch.groups, batch.rollouts))


def ppo(batch):
    advantages, returns = gae(
        batch.rewards,
        batch.values,
        batch.mask,
        batch.lengths,
        gamma=0.99,
        lam=0.95,
        token_rewards=batch.token_rewards,
    )
    return Estimate(whiten(advantages, batch.mask), returns)


def reinforce_plus_plus(batch):
    kl = kl_divergence(batch.log_probs, batch.ref_log_probs, "k1")
    returns = reinforce_returns(batch.rewards, batch.mask, batch.lengths, gamma=0.9, kl=kl, beta=0.1)
    return whiten(returns, batch.mask)


def reinforce_baseline(batch):
    kl = kl_divergence(batch.log_probs, batch.ref_log_probs, "k2")
    advantages = baseline_advantages(
        batch.rewards, batch.groups, batch.rollouts, batch.mask, batch.lengths, kl=kl, beta=0.1
    )
    return whiten(advantages, batch.mask)


@pytest.mark.parametrize(
    ("function", "traits"),
    [(grpo, GROUP), (rloo, GROUP), (ppo, VALUES), (reinforce_plus_plus, KL), (reinforce_baseline, KL)],
)
def test_sound_estimators_pass(function, traits):
    assert check_advantage(Estimator(function), traits=traits) == []


def undeclared(batch):
    return grpo(batch) - batch.values


def not_masked(batch):
    return torch.repeat_interleave(batch.rewards, batch.lengths)


def float64(batch):
    return batch.spread(batch.rewards.double())


def per_sample(batch):
    return batch.rewards


def with_returns(batch):
    return Estimate(grpo(batch), grpo(batch))


def infinite(batch):
    return batch.spread(batch.rewards / (batch.rewards - 0.5))


def depends_on_order(batch):
    return batch.spread(batch.rewards * torch.arange(len(batch.rewards)))


def depends_on_names(batch):
    return batch.spread(batch.rewards - batch.groups)


def counts_masked_tokens(batch):
    return batch.spread(batch.rewards / batch.lengths)


def mean_over_samples(batch):
    return batch.spread(batch.rewards - batch.rewards.mean())


def counts_sequences(batch):
    """Takes every sequence for a rollout of its own."""
    return batch.spread(group_advantages(batch.rewards, batch.groups, torch.arange(len(batch.rewards))))


def no_eps(batch):
    """Divides by the deviation over everything, even where that is 0."""
    centered = batch.rewards - batch.rewards.mean()
    return batch.spread(centered / centered.square().mean().sqrt())


def rounding_over_eps(batch):
    """Divides the rounding error of the mean by a tiny number."""
    _, group = torch.unique(batch.groups, return_inverse=True)
    count = torch.bincount(group)
    mean = torch.zeros(len(count)).index_add(0, group, batch.rewards) / count
    return batch.spread((batch.rewards + 1e-7 - mean[group]) / 1e-6)


def impure_values(batch):
    return grpo(batch) * next(CALLS)


def impure_inputs(batch):
    result = grpo(batch)
    batch.rewards.mul_(2.0)
    return result


@pytest.mark.parametrize(
    ("function", "promise"),
    [
        (undeclared, "declared inputs"),
        (not_masked, "declared inputs"),
        (float64, "declared inputs"),
        (per_sample, "declared inputs"),
        (with_returns, "declared inputs"),
        (infinite, "declared inputs"),
        (depends_on_order, "order"),
        (depends_on_names, "names"),
        (counts_masked_tokens, "padding"),
        (mean_over_samples, "empty sample"),
        (counts_sequences, "rollouts count once"),
        (no_eps, "zero variance"),
        (no_eps, "group of one"),
        (rounding_over_eps, "zero variance"),
        (impure_values, "pure"),
        (impure_inputs, "pure"),
    ],
)
def test_every_broken_promise_is_caught(function, promise):
    findings = check_advantage(Estimator(function), traits=GROUP)
    assert promise in {finding.promise for finding in findings}


def test_values_at_masked_tokens_must_not_count():
    def leaks(batch):
        return batch.spread(torch.zeros(len(batch.lengths)).index_add(0, batch.sample_ids, batch.log_probs))

    findings = check_advantage(Estimator(leaks), traits=AdvantageTraits(inputs=frozenset({"log_probs"})))
    assert "masking" in {finding.promise for finding in findings}


def test_missing_returns_are_caught():
    (finding,) = check_advantage(Estimator(grpo), traits=AdvantageTraits(group=True, returns=True))
    assert "the estimate has no returns, but the traits say returns=True" in finding.got


def test_an_undeclared_input_is_named():
    (finding,) = check_advantage(Estimator(undeclared), traits=GROUP)
    assert "'values' is not in this batch; declare it" in finding.got
    assert str(finding).startswith("declared inputs: a rollout that has rewards: expected no exception, got Attribute")


def test_components_bring_their_traits_and_options():
    class Local(Options):
        scale: float = 1.0

    component = Component("mine", NoOptions, GROUP, lambda _: Estimator(rloo), "For tests.")
    assert check_advantage(component) == []
    local = Component("mine", Local, GROUP, lambda _: Estimator(rloo), "For tests.")
    assert [f.promise for f in check_advantage(local)] == ["picklable options"]
    with pytest.raises(ValueError, match="build it with them, or name it"):
        check_advantage(Estimator(rloo), {"scale": 2.0})
