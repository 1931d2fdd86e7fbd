"""The advantage estimators through the registry, with the golden values of the formulas."""

import pytest
import torch
from milepost.registry import current, resolve
from milepost.testing import check_advantage
from milepost.training.inputs import AdvantageBatch

CASES = (
    ("gae", {}),
    ("gae", {"gamma": 0.9, "lam": 0.8, "normalize": False}),
    ("rloo", {}),
    ("raw", {}),
    ("reinforce_pp", {}),
    ("reinforce_pp", {"beta": 0.0, "gamma": 0.9}),
    ("reinforce_pp", {"beta": 0.2, "kl_type": "k3", "normalize": False}),
    ("reinforce_pp_baseline", {}),
    ("reinforce_pp_baseline", {"beta": 0.0}),
    ("reinforce_pp_baseline", {"beta": 0.2, "kl_type": "low_var_kl", "normalize": False}),
)


def estimate(name, options, lengths, mask, groups=None, **inputs):
    batch = AdvantageBatch(
        lengths=torch.tensor(lengths),
        mask=torch.tensor(mask, dtype=torch.bool),
        groups=torch.tensor(groups or [0] * len(lengths)),
        rollouts=torch.arange(len(lengths)),
        inputs={key: torch.tensor(column) for key, column in inputs.items()},
    )
    return resolve("advantage", name, options).estimate(batch)


@pytest.mark.parametrize(("name", "options"), CASES)
def test_keeps_every_promise(name, options):
    assert check_advantage(name, options) == []


@pytest.mark.parametrize("gap", [1, 5])
def test_golden_gae_environment_tokens_take_no_time(gap):
    zeros = [0.0] * (gap + 2)
    options = {"gamma": 0.9, "lam": 0.5, "normalize": False}
    mask = [1, *[0] * gap, 1]
    got = estimate("gae", options, [gap + 2], mask, rewards=[2.0], values=zeros, token_rewards=zeros)
    assert got.advantages.tolist() == pytest.approx([0.9, *[0.0] * gap, 2.0], rel=1e-6)
    assert got.returns.tolist() == got.advantages.tolist()


def test_golden_gae_reward_at_the_last_trainable_token():
    got = estimate(
        "gae",
        {"gamma": 0.0, "lam": 0.0, "normalize": False},
        [5],
        [1, 1, 1, 0, 0],
        rewards=[10.0],
        values=[0.5, -0.2, 0.3, 0.9, 0.9],
        token_rewards=[0.1, 0.2, 0.3, 7.0, 7.0],
    )
    assert got.advantages.tolist() == pytest.approx([-0.4, 0.4, 10.0, 0.0, 0.0], rel=1e-6)


def test_golden_gae_by_its_default_options():
    inputs = {"rewards": [1.5], "values": [0.4, -0.1, 0.25, 0.6], "token_rewards": [0.1, -0.2, 0.3, 0.05]}
    plain = estimate("gae", {"normalize": False}, [4], [1] * 4, **inputs)
    assert plain.advantages.tolist() == pytest.approx([1.35, 1.75, 1.60, 0.95], rel=1e-6)
    white = estimate("gae", {}, [4], [1] * 4, **inputs)
    # mean 1.4125, deviation (n - 1) of 1.35 1.75 1.60 0.95
    deviation = (sum((x - 1.4125) ** 2 for x in (1.35, 1.75, 1.60, 0.95)) / 3) ** 0.5
    assert white.advantages.tolist() == pytest.approx(
        [(x - 1.4125) / deviation for x in (1.35, 1.75, 1.60, 0.95)], rel=1e-5
    )
    # whitening is for the actor: the critic learns from the returns as they are
    assert white.returns.tolist() == plain.returns.tolist() == pytest.approx([1.75, 1.65, 1.85, 1.55], rel=1e-6)


def test_golden_gae_discounted():
    values = [0.1, 0.2, 0.3, 0.4]
    options = {"gamma": 0.9, "lam": 0.8, "normalize": False}
    got = estimate("gae", options, [4], [1] * 4, rewards=[1.0], values=values, token_rewards=[0.0] * 4)
    assert got.advantages.tolist() == pytest.approx([0.385453, 0.424240, 0.492, 0.6], abs=1e-6)


def test_golden_gae_a_sample_without_a_trainable_token():
    def advantages(lengths, mask, rewards):
        zeros = [0.0] * len(mask)
        return estimate("gae", {}, lengths, mask, rewards=rewards, values=zeros, token_rewards=zeros)

    alone = advantages([2, 2], [1, 1, 1, 1], [1.0, 0.0])
    mixed = advantages([2, 3, 2], [1, 1, 0, 0, 0, 1, 1], [1.0, 9.0, 0.0])
    assert mixed.advantages.tolist() == [*alone.advantages[:2].tolist(), 0.0, 0.0, 0.0, *alone.advantages[2:].tolist()]
    assert mixed.returns[2:5].tolist() == [0.0] * 3


def test_golden_rloo():
    got = estimate("rloo", {}, [1, 1, 1, 1], [1] * 4, rewards=[1.0, 0.0, 0.0, 1.0])
    assert got.advantages.tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3], rel=1e-6)
    alone = estimate("rloo", {}, [1, 2], [1, 1, 0], groups=[0, 1], rewards=[1.0, 0.5])
    assert alone.advantages.tolist() == [0.0] * 3


def test_golden_dr_grpo():
    options = current().get("algorithm", "dr_grpo").component.traits.advantage_options
    got = estimate("group", dict(options), [1, 1, 1, 1], [1] * 4, rewards=[1.0, 0.0, 0.0, 1.0])
    assert got.advantages.tolist() == [0.5, -0.5, -0.5, 0.5]


def test_golden_reinforce_pp_baseline():
    options = {"beta": 0.0, "normalize": False}
    got = estimate("reinforce_pp_baseline", options, [1, 1, 1, 1], [1] * 4, rewards=[1.0, 0.0, 0.0, 0.0])
    assert got.advantages.tolist() == [0.75, -0.25, -0.25, -0.25]
    log_probs = {"log_probs": [-1.0, -2.0, -0.5], "ref_log_probs": [-1.5, -1.0, -0.5]}
    penalised = estimate(
        "reinforce_pp_baseline",
        {"beta": 0.1, "normalize": False},
        [2, 1],
        [1, 1, 1],
        rewards=[1.0, 0.0],
        **log_probs,
    )
    # k1 of the three tokens: .5, -1, 0
    assert penalised.advantages.tolist() == pytest.approx([0.5 - 0.05, 0.5 + 0.1, -0.5], rel=1e-6)


def test_reinforce_pp_by_hand():
    got = estimate(
        "reinforce_pp",
        {"beta": 0.1, "gamma": 0.5, "normalize": False},
        [4],
        [0, 1, 1, 1],
        rewards=[2.0],
        log_probs=[9.0, -1.0, -2.0, -0.5],
        ref_log_probs=[0.0, -1.5, -1.0, -0.5],
    )
    # r = -.05, .1, 2, so G = 2, .1 + 1, -.05 + .55
    assert got.advantages.tolist() == pytest.approx([0.0, 0.5, 1.1, 2.0], rel=1e-6)
    white = estimate("reinforce_pp", {"beta": 0.0}, [1, 1, 1, 1], [1] * 4, rewards=[1.0, 2.0, 3.0, 4.0])
    assert white.advantages.tolist() == pytest.approx([-1.161895, -0.387298, 0.387298, 1.161895], abs=1e-6)


def test_raw():
    got = estimate("raw", {}, [2, 3], [0, 1, 1, 0, 1], rewards=[0.5, -2.0])
    assert got.advantages.tolist() == [0.0, 0.5, -2.0, 0.0, -2.0]


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_a_penalty_without_weight_reads_no_log_probs(name):
    component = current().get("advantage", name).component
    penalised, plain = (component.traits.reads(component.options(beta=beta)) for beta in (0.01, 0.0))
    assert penalised == {"rewards", "log_probs", "ref_log_probs"}
    assert plain == {"rewards"}


def test_traits():
    traits = current().get("advantage", "gae").component.traits
    assert traits.inputs == {"rewards", "token_rewards", "values"}
    assert (traits.returns, traits.group) == (True, False)
    assert [current().get("advantage", name).component.traits.group for name in ("rloo", "raw", "reinforce_pp")] == [
        True,
        False,
        False,
    ]
