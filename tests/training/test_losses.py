"""The kernel's part of the loss, on algorithms of a line each; and how metrics are summed and merged."""

import math

import pytest
import torch
from milepost.config.schema import AlgorithmSection
from milepost.training.inputs import AdvantageBatch, Metric, PolicyInputs, SampleIndex, TokenLoss, ValueInputs
from milepost.training.losses import MetricSums, policy_objective, value_objective

NAN = math.nan
MASK = torch.tensor([False, True, True, False, True])
INDEX = SampleIndex(MASK, torch.tensor([0, 0, 0, 1, 1]), 2)
WEIGHTS = torch.tensor([9.0, 0.25, 0.25, 9.0, 0.5])
ADVANTAGES = torch.tensor([NAN, 1.0, 1.0, NAN, -2.0])


COLUMNS = (
    "log_probs",
    "old_log_probs",
    "advantages",
    "engine_log_probs",
    "ref_log_probs",
    "teacher_log_probs",
)


class Reinforce:
    """-A logp, with one metric of each kind."""

    def policy_loss(self, inputs):
        metrics = {
            "token_mean": Metric(inputs.log_probs),
            "token_max": Metric(inputs.log_probs, "max"),
            "token_min": Metric(inputs.log_probs, "min"),
            "sample_mean": Metric(inputs.index.per_sample(inputs.log_probs), "mean", per="sample"),
            "sample_sum": Metric(inputs.index.per_sample(inputs.log_probs), "sum", per="sample"),
        }
        return TokenLoss(-inputs.advantages * inputs.log_probs, metrics)


class Returning:
    """Returns whatever it was made with."""

    def __init__(self, loss):
        self.loss = loss

    def policy_loss(self, inputs):
        return self.loss


def make_inputs(**changes):
    columns = {
        "log_probs": torch.tensor([NAN, -1.0, -2.0, math.inf, -3.0], requires_grad=True),
        "old_log_probs": torch.tensor([NAN, -1.0, -2.5, NAN, -3.0]),
        "advantages": ADVANTAGES,
        "index": INDEX,
    }
    return PolicyInputs(**(columns | changes))


def settings(**keys):
    return AlgorithmSection.model_validate({"name": "test", **keys})


def reduced(metrics, index=INDEX):
    sums = MetricSums()
    sums.add(metrics, index)
    return sums.result()


def test_policy_term_alone():
    inputs = make_inputs()
    loss, metrics = policy_objective(Reinforce(), inputs, WEIGHTS, settings())
    assert loss.item() == pytest.approx(0.25 * 1.0 + 0.25 * 2.0 + 0.5 * -6.0)
    loss.backward()
    assert inputs.log_probs.grad is not None
    assert inputs.log_probs.grad.tolist() == pytest.approx([0.0, -0.25, -0.25, 0.0, 1.0])
    assert reduced(metrics) == pytest.approx(
        {
            "loss": -2.25,
            "pg_loss": -2.25,
            "old_log_prob_diff": 0.5,
            "ratio_mean": (2 + math.exp(0.5)) / 3,
            "ratio_square": (2 + math.exp(1.0)) / 3,
            "token_mean": -2.0,
            "token_max": -1.0,
            "token_min": -3.0,
            "sample_mean": -3.0,
            "sample_sum": -6.0,
        }
    )


def test_the_algorithm_sees_zeros_at_masked_tokens_and_one_gradient():
    seen = {}

    class Looks:
        def policy_loss(self, inputs):
            for name in COLUMNS:
                seen[name] = getattr(inputs, name)
            return TokenLoss(inputs.log_probs)

    dirty = {name: torch.tensor([NAN, -1.0, -2.0, math.inf, -3.0], requires_grad=True) for name in COLUMNS}
    policy_objective(Looks(), make_inputs(**dirty), WEIGHTS, settings())
    for name in COLUMNS:
        assert seen[name].tolist() == [0.0, -1.0, -2.0, 0.0, -3.0], name
        assert seen[name].requires_grad == (name == "log_probs"), name


def test_nothing_that_an_algorithm_or_a_weight_has_at_masked_tokens_gets_through():
    class Undefined:
        def policy_loss(self, inputs):
            return TokenLoss(inputs.advantages * (inputs.log_probs - inputs.log_probs.detach()) / inputs.log_probs)

    inputs = make_inputs()
    weights = torch.where(MASK, WEIGHTS, NAN)
    loss, metrics = policy_objective(Undefined(), inputs, weights, settings())
    loss.backward()
    assert loss.item() == 0.0
    assert inputs.log_probs.grad is not None
    assert inputs.log_probs.grad.tolist() == pytest.approx([0.0, -0.25, -0.125, 0.0, 1 / 3])
    assert metrics["pg_loss"].values.tolist() == [0.0] * 5


def test_entropy_bonus_and_reference_kl():
    entropy = torch.tensor([NAN, 2.0, 4.0, NAN, 6.0], requires_grad=True)
    inputs = make_inputs(ref_log_probs=torch.tensor([NAN, -1.5, -1.0, NAN, -3.0]))
    loss, metrics = policy_objective(
        Reinforce(), inputs, WEIGHTS, settings(entropy_coef=0.1, kl_loss_coef=0.5, kl_loss_type="k2"), entropy
    )
    kl = 0.25 * 0.125 + 0.25 * 0.5
    bonus = 0.25 * 2 + 0.25 * 4 + 0.5 * 6
    assert loss.item() == pytest.approx(-2.25 - 0.1 * bonus + 0.5 * kl)
    loss.backward()
    assert entropy.grad is not None
    assert entropy.grad.tolist() == pytest.approx([0.0, -0.025, -0.025, 0.0, -0.05])
    assert inputs.log_probs.grad is not None
    assert inputs.log_probs.grad.tolist() == pytest.approx([0.0, -0.25 + 0.0625, -0.25 - 0.125, 0.0, 1.0])
    result = reduced(metrics)
    expected = {"pg_loss": -2.25, "kl_loss": kl, "entropy": 4.0, "entropy_loss": bonus, "loss": loss.item()}
    assert {name: result[name] for name in expected} == pytest.approx(expected)


def test_entropy_and_kl_are_reported_without_a_coefficient_but_not_trained_on():
    entropy = torch.tensor([NAN, 2.0, 4.0, NAN, 6.0], requires_grad=True)
    inputs = make_inputs(ref_log_probs=torch.zeros(5))
    loss, metrics = policy_objective(Reinforce(), inputs, WEIGHTS, settings(), entropy)
    assert loss.item() == pytest.approx(-2.25)
    loss.backward()
    assert entropy.grad is None
    assert {"entropy", "entropy_loss", "kl_loss"} <= reduced(metrics).keys()


@pytest.mark.parametrize(
    ("correction", "factors", "clipfrac"),
    [
        ({"name": "tis", "low": 0.5, "high": 2.0}, [1.0, 2.0, 0.5], 2 / 3),
        ({"name": "icepop", "low": 0.5, "high": 2.0}, [1.0, 0.0, 0.0], 2 / 3),
        ({"name": "tis", "low": 0.0, "high": 9.0}, [1.0, 4.0, 0.25], 0.0),
    ],
)
def test_correction_multiplies_the_policy_term_alone(correction, factors, clipfrac):
    old = torch.tensor([NAN, -1.0, -2.0, NAN, -3.0])
    engine = torch.tensor([NAN, -1.0, -2.0 - math.log(4), NAN, -3.0 + math.log(4)])
    inputs = make_inputs(old_log_probs=old, engine_log_probs=engine, ref_log_probs=torch.zeros(5))
    loss, metrics = policy_objective(
        Reinforce(), inputs, WEIGHTS, settings(correction=correction, kl_loss_coef=1.0, kl_loss_type="k1")
    )
    policy_term = 0.25 * 1.0 * factors[0] + 0.25 * 2.0 * factors[1] + 0.5 * -6.0 * factors[2]
    kl = 0.25 * -1.0 + 0.25 * -2.0 + 0.5 * -3.0
    assert loss.item() == pytest.approx(policy_term + kl)
    loss.backward()
    assert inputs.log_probs.grad is not None
    grads = [0.25 * (1 - factors[0]), 0.25 * (1 - factors[1]), 0.5 * (1 + 2 * factors[2])]
    assert inputs.log_probs.grad[MASK].tolist() == pytest.approx(grads)
    result = reduced(metrics)
    assert result["correction_factor"] == pytest.approx(sum(factors) / 3)
    assert result["correction_clipfrac"] == pytest.approx(clipfrac)
    assert result["log_prob_diff"] == pytest.approx(2 * math.log(4) / 3)
    assert result["log_prob_diff_max"] == pytest.approx(math.log(4))


def test_a_non_finite_loss_of_a_trainable_token_is_not_hidden():
    loss, _ = policy_objective(
        Reinforce(), make_inputs(advantages=torch.tensor([0.0, 1.0, NAN, 0.0, 0.0])), WEIGHTS, settings()
    )
    assert math.isnan(loss.item())


def test_filler_gives_a_zero_with_zero_gradients():
    log_probs = torch.tensor([NAN, -1.0], requires_grad=True)
    index = SampleIndex(torch.zeros(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1)
    inputs = PolicyInputs(log_probs, torch.zeros(2), torch.ones(2), index)
    loss, metrics = policy_objective(Reinforce(), inputs, torch.zeros(2), settings())
    loss.backward()
    assert loss.item() == 0.0
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0.0, 0.0]
    assert reduced(metrics, index) == {"loss": 0.0, "pg_loss": 0.0, "sample_sum": 0.0}


def test_float64_stays_float64():
    inputs = make_inputs(log_probs=torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True))
    loss, _ = policy_objective(Reinforce(), inputs, WEIGHTS, settings())
    assert loss.dtype == torch.float64


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"entropy_coef": 0.1}, "entropy_coef is 0.1, but no entropy was given"),
        ({"kl_loss_coef": 0.1}, "kl_loss_coef is 0.1, but no reference log-probs were given"),
        ({"correction": {"name": "tis"}}, "correction 'tis' compares with the engine's log-probs, but none were given"),
    ],
)
def test_a_missing_input_is_named(keys, message):
    with pytest.raises(ValueError, match=message):
        policy_objective(Reinforce(), make_inputs(), WEIGHTS, settings(**keys))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (TokenLoss(torch.zeros(())), r"losses of shape \(\), expected one per token \(5,\)"),
        (TokenLoss(torch.zeros(5), {"loss": Metric(torch.zeros(5))}), "the algorithm reports loss, which the kernel"),
        (
            TokenLoss(torch.zeros(5), {"mine": Metric(torch.zeros(()))}),
            r"metric 'mine' has shape \(\), expected one value per token \(5,\)",
        ),
        (
            TokenLoss(torch.zeros(5), {"mine": Metric(torch.zeros(5), per="sample")}),
            r"metric 'mine' has shape \(5,\), expected one value per sample \(2,\)",
        ),
    ],
)
def test_a_broken_algorithm_is_told_what_is_wrong(loss, message):
    with pytest.raises(ValueError, match=message):
        policy_objective(Returning(loss), make_inputs(), WEIGHTS, settings())


def test_unequal_lengths_are_refused():
    with pytest.raises(ValueError, match=r"weights \(4,\)"):
        policy_objective(Reinforce(), make_inputs(), torch.zeros(4), settings())


def value_inputs():
    values = torch.tensor([NAN, 0.5, 0.1, NAN, 2.0], requires_grad=True)
    old, returns = torch.tensor([NAN, 0.0, 0.0, NAN, 2.0]), torch.tensor([NAN, 1.0, 1.0, NAN, 1.0])
    return ValueInputs(values, old, returns, 0.2, INDEX)


def test_default_value_loss():
    inputs = value_inputs()
    loss, metrics = value_objective(Reinforce(), inputs, WEIGHTS)
    expected = 0.25 * 0.64 + 0.25 * 0.81 + 0.5 * 1.0
    assert loss.item() == pytest.approx(expected)
    loss.backward()
    assert inputs.values.grad is not None
    assert inputs.values.grad.tolist() == pytest.approx([0.0, 0.0, 0.25 * -1.8, 0.0, 1.0])
    assert reduced(metrics) == pytest.approx(
        {"loss": expected, "value_loss": expected, "values": 2.6 / 3, "returns": 1.0, "value_clipfrac": 1 / 3}
    )


def test_an_algorithm_may_bring_its_own_value_loss():
    class WithCritic(Reinforce):
        def value_loss(self, inputs):
            return TokenLoss(inputs.values, {"mine": Metric(inputs.values, "sum")})

    loss, metrics = value_objective(WithCritic(), value_inputs(), WEIGHTS)
    assert loss.item() == pytest.approx(0.25 * 0.5 + 0.25 * 0.1 + 0.5 * 2.0)
    assert reduced(metrics)["mine"] == pytest.approx(2.6)


def test_metric_sums_over_micro_batches_equal_those_of_one():
    inputs = make_inputs()
    _, metrics = policy_objective(Reinforce(), inputs, WEIGHTS, settings())
    sums = MetricSums()
    for tokens, sample in ((slice(0, 3), 0), (slice(3, 5), 1)):
        index = SampleIndex(MASK[tokens], torch.zeros(int(MASK[tokens].numel()), dtype=torch.int64), 1)
        part = PolicyInputs(inputs.log_probs[tokens], inputs.old_log_probs[tokens], inputs.advantages[tokens], index)
        sums.add(policy_objective(Reinforce(), part, WEIGHTS[tokens], settings())[1], index)
        assert sums.state().sums[1].item() == sample + 1
    assert sums.result() == pytest.approx(reduced(metrics))


def test_metric_sums_merge_over_ranks_and_count_samples_once_under_context_parallelism():
    # Two ranks share both samples: each has part of the tokens and the whole of every per-sample value.
    per_sample = torch.tensor([3.0, 5.0])
    count = {"n": 0}

    def all_reduce(x):
        count["n"] += 1
        return torch.tensor([2.0, 1.0])

    halves = []
    for mask, values in (([True, False], [1.0, 8.0]), ([True, True], [3.0, 8.0])):
        index = SampleIndex(torch.tensor(mask), torch.tensor([0, 1]), 2, all_reduce)
        sums = MetricSums(context_parallel=2)
        sums.add(
            {
                "token": Metric(torch.tensor(values)),
                "high": Metric(torch.tensor(values), "max"),
                "low": Metric(torch.tensor(values), "min"),
                "mean": Metric(per_sample, "mean", per="sample"),
                "sum": Metric(per_sample, "sum", per="sample"),
            },
            index,
        )
        halves.append(sums)
    first, second = (half.state() for half in halves)
    merged = (
        first.sums + second.sums,
        torch.maximum(first.maxes, second.maxes),
        torch.minimum(first.mins, second.mins),
    )
    halves[0].load(merged)
    assert halves[0].result() == {"token": 4.0, "high": 8.0, "low": 1.0, "mean": 4.0, "sum": 8.0}
    assert count["n"] == 2


def test_metric_sums_ignore_samples_without_a_trainable_token():
    index = SampleIndex(torch.tensor([True, False]), torch.tensor([0, 1]), 2)
    sums = MetricSums()
    sums.add({"mine": Metric(torch.tensor([4.0, NAN]), per="sample")}, index)
    assert sums.result() == {"mine": 4.0}


def test_metric_sums_count_beyond_float32():
    index = SampleIndex(torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.int64), 1)
    sums = MetricSums()
    sums.add({"mine": Metric(torch.tensor([2.0**24, 1.0]), "sum")}, index)
    sums.add({"mine": Metric(torch.tensor([1.0, 1.0]), "sum")}, index)
    assert sums.result() == {"mine": 2.0**24 + 3.0}


def test_metric_sums_refuse_what_does_not_fit():
    sums = MetricSums()
    with pytest.raises(ValueError, match="no metrics were added"):
        sums.result()
    sums.add({"mine": Metric(torch.ones(5))}, INDEX)
    with pytest.raises(ValueError, match="this micro-batch has other metrics"):
        sums.add({"other": Metric(torch.ones(5))}, INDEX)
    with pytest.raises(ValueError, match="expected a state of shapes"):
        sums.load((torch.zeros(2), torch.zeros(0), torch.zeros(0)))


def test_sample_index_and_advantage_batch_check_their_shapes():
    with pytest.raises(ValueError, match="expected a mask"):
        SampleIndex(torch.ones(2), torch.zeros(2, dtype=torch.int64), 1)
    ids = torch.zeros(2, dtype=torch.int64)
    lengths = torch.tensor([1, 2])
    mask = torch.ones(3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"input 'rewards' of shape \(3,\)"):
        AdvantageBatch(lengths=lengths, mask=mask, groups=ids, rollouts=ids, inputs={"rewards": torch.zeros(3)})
    with pytest.raises(ValueError, match="the lengths sum to 3, but there are 4 tokens"):
        AdvantageBatch(lengths=lengths, mask=torch.ones(4, dtype=torch.bool), groups=ids, rollouts=ids, inputs={})
    batch = AdvantageBatch(lengths=lengths, mask=mask, groups=ids, rollouts=ids, inputs={"rewards": torch.ones(2)})
    assert batch.sample_ids.tolist() == [0, 1, 1]
    assert batch.spread(torch.tensor([5.0, 7.0])).tolist() == [5.0, 7.0, 7.0]
    with pytest.raises(AttributeError, match="'values' is not in this batch; declare it"):
        _ = batch.values
