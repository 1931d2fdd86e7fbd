from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from milepost.components import AlgorithmTraits, Component, ModelLayout, NoOptions
from milepost.config.plan import Choice, Plan
from milepost.config.schema import RunConfig
from milepost.errors import CheckpointError, ConfigError, PhaseError
from milepost.functional.aggregation import token_weights
from milepost.recipe import HFModel
from milepost.training.inputs import Metric, PolicyInputs, TokenLoss
from milepost.training.schedule import Schedule, StepSchedule, make_schedule
from milepost.training.torch_trainer import TorchTrainer
from milepost.training.trainer import Batch
from milepost.weights.hf import load_causal_lm
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

CPU = torch.device("cpu")
LENGTHS = [7, 12, 5, 9, 12, 3, 10, 8]
TEMPERATURE = 0.8


class Clip:
    """The PPO clip, written out; enough of an algorithm to train with."""

    def policy_loss(self, inputs: PolicyInputs) -> TokenLoss:
        ratio = (inputs.log_probs - inputs.old_log_probs).exp()
        clipped = ratio.clamp(0.8, 1.2)
        values = -torch.minimum(ratio * inputs.advantages, clipped * inputs.advantages)
        return TokenLoss(values, {"ratio": Metric(ratio.detach(), "max")})


class Hf:
    def load(self, path: Path, dtype: torch.dtype, device: torch.device) -> HFModel:
        return load_causal_lm(path, dtype, device)

    def decoder(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Any:
        raise AssertionError("the trainer decodes nothing")


@dataclass
class Recipe:
    hf: Hf = field(default_factory=Hf)
    megatron: None = None


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp("tiny") / "model"
    model.save_pretrained(path)
    return path


def make_plan(path: Path, critic: bool = False, **sections: dict[str, Any]) -> Plan:
    given: dict[str, Any] = {
        "model": {"path": str(path)},
        "data": {"path": "none.jsonl"},
        "reward": {"name": "none"},
        "rollout": {"temperature": TEMPERATURE},
        "optimizer": {"lr": 1e-2, "clip_grad": 0.0},
    }
    for name, section in sections.items():
        given[name] = given.get(name, {}) | section
    component: Component[Any] = Component("none", NoOptions, AlgorithmTraits(), lambda _: None, "Nothing.")
    choice = Choice(component, NoOptions(), "none")
    return Plan(
        config=RunConfig.model_validate(given),
        origins={},
        run_dir=path,
        base_dir=path,
        algorithm=choice,
        advantage=choice,
        reward=choice,
        model=choice,
        transport=choice,
        layout=ModelLayout(2, 16, 4, 2, 8, 31, 0, True, 64),
        model_path=path,
        num_rollouts=4,
        batch_size=4,
        samples_per_prompt=2,
        global_batch_size=8,
        steps_per_rollout=1,
        world_size=1,
        data_parallel=1,
        needs_critic=critic,
        needs_reference=False,
        needs_teacher=False,
    )


def make_trainer(path: Path, dtype: torch.dtype = torch.float32, critic: bool = False, **sections: Any) -> TorchTrainer:
    plan = make_plan(path, critic, **sections)
    return TorchTrainer(plan, recipe=Recipe(), algorithm=Clip(), device=CPU, dtype=dtype)


def make_batch(old: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    lengths = torch.tensor(LENGTHS)
    starts = lengths.cumsum(0) - lengths
    mask = torch.rand(total, generator=generator) < 0.7
    mask[starts] = False
    mask[starts[5] : starts[5] + LENGTHS[5]] = False  # a sample without a trainable token
    columns = {
        "tokens": torch.randint(0, 31, (total,), generator=generator).to(torch.int32),
        "mask": mask,
        "advantages": torch.randn(total, generator=generator),
        "engine_log_probs": -torch.rand(total, generator=generator),
        "ref_log_probs": -torch.rand(total, generator=generator) * 4,
        "values": torch.randn(total, generator=generator),
        "returns": torch.randn(total, generator=generator),
        "weights": token_weights(
            mask, lengths, torch.arange(8), aggregation="sample_mean", global_batch_size=8, constant=1.0
        ),
    }
    if old:
        columns["old_log_probs"] = -torch.rand(total, generator=generator) * 5
    return Batch(lengths, columns)


def make_step(budget: int = 1000) -> StepSchedule:
    schedule = make_schedule(
        LENGTHS, range(8), data_parallel=1, global_batch_size=8, steps_per_rollout=1, token_budget=budget
    )
    return schedule.steps[0]


def plain_log_softmax(path: Path, batch: Batch, dtype: torch.dtype) -> tuple[torch.nn.Module, Tensor, Tensor]:
    """transformers' own padded forward: model, log-probs [N] of each token and entropy [N] before it."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    longest = int(batch.lengths.max())
    tokens = torch.zeros(batch.num_samples, longest, dtype=torch.int64)
    attention = torch.zeros(batch.num_samples, longest, dtype=torch.int64)
    for row in range(batch.num_samples):
        first, last = int(batch.offsets[row]), int(batch.offsets[row + 1])
        tokens[row, : last - first] = batch["tokens"][first:last]
        attention[row, : last - first] = 1
    logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits
    log_softmax = (logits / TEMPERATURE).log_softmax(-1)
    picked = F.pad(log_softmax[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2), (1, 0))
    entropy = F.pad(-(log_softmax.exp() * log_softmax).sum(-1)[:, :-1], (1, 0))
    real = attention.bool()
    return model, picked[real], entropy[real]


def plain_grpo_gradients(path: Path, batch: Batch, dtype: torch.dtype, **coefficients: float) -> dict[str, Tensor]:
    model, log_probs, entropy = plain_log_softmax(path, batch, dtype)
    advantages, old, reference = (batch[name].to(dtype) for name in ("advantages", "old_log_probs", "ref_log_probs"))
    ratio = (log_probs - old).exp()
    loss = torch.max(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
    loss = loss - coefficients["entropy_coef"] * entropy
    difference = log_probs - reference
    loss = loss + coefficients["kl_loss_coef"] * ((-difference).exp() - 1 + difference)
    total = torch.zeros((), dtype=dtype)
    for row in range(batch.num_samples):
        sample = slice(int(batch.offsets[row]), int(batch.offsets[row + 1]))
        mask = batch["mask"][sample].to(dtype)
        if mask.sum() > 0:
            total = total + (loss[sample] * mask).sum() / mask.sum() / batch.num_samples
    total.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradients(trainer: TorchTrainer, role: Any = "actor") -> dict[str, Tensor]:
    return {
        name: view.clone()
        for group in trainer._trained[role].optimizer.groups
        for name, view in zip(group.names, group.views(group.gradient), strict=True)
    }


def distance(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm."""
    assert left.keys() == right.keys()
    difference = sum(float((left[name] - right[name]).square().sum()) for name in left) ** 0.5
    return difference / sum(float(right[name].square().sum()) for name in right) ** 0.5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_equal_plain_transformers(
    checkpoint: Path, dtype: torch.dtype, tolerance: float, recompute: str
) -> None:
    coefficients = {"entropy_coef": 0.03, "kl_loss_coef": 0.1}
    settings = {"kl_loss_type": "k3", **coefficients}
    trainer = make_trainer(checkpoint, dtype, algorithm=settings, trainer={"recompute": recompute})
    batch = make_batch()
    counts = [int(part.sum()) for part in batch["mask"].split(LENGTHS)]
    weights = [
        torch.full((length,), 1 / (8 * max(n, 1)), dtype=dtype) for length, n in zip(LENGTHS, counts, strict=True)
    ]
    torch.testing.assert_close(torch.where(batch["mask"], torch.cat(weights).float(), 0.0), batch["weights"])
    batch["weights"] = torch.cat(weights)
    result = trainer.step("actor", make_step(budget=30), batch)
    assert not result.skipped
    expected = plain_grpo_gradients(checkpoint, batch, dtype, **coefficients)
    assert distance(gradients(trainer), expected) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_gradients_do_not_depend_on_the_split(
    checkpoint: Path, dtype: torch.dtype, tolerance: float, role: Any
) -> None:
    results, norms = [], []
    for budget in (1000, 34, 20, 12):
        trainer = make_trainer(checkpoint, dtype, critic=True, algorithm={"entropy_coef": 0.01})
        result = trainer.step(role, make_step(budget), make_batch())
        results.append(gradients(trainer, role))
        norms.append(result.metrics)
    for other, metrics in zip(results[1:], norms[1:], strict=True):
        assert distance(other, results[0]) < tolerance
        assert metrics == pytest.approx(norms[0], rel=1e-5)


def test_log_probs_and_entropy_equal_plain_transformers(checkpoint: Path) -> None:
    trainer = make_trainer(checkpoint)
    batch = make_batch()
    _, log_probs, entropy = plain_log_softmax(checkpoint, batch, torch.float32)
    columns = trainer.forward("actor", Schedule((make_step(30),)), batch, ("log_probs", "entropy"))
    mask = batch["mask"]
    assert columns["log_probs"].dtype == torch.float32
    torch.testing.assert_close(columns["log_probs"], torch.where(mask, log_probs.detach(), 0.0), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(columns["entropy"], torch.where(mask, entropy.detach(), 0.0), rtol=1e-5, atol=1e-5)
    reference = trainer.forward("reference", Schedule((make_step(30),)), batch, ("log_probs",))
    assert torch.equal(reference["log_probs"], columns["log_probs"])


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_old_log_probs_with_the_same_packing_are_those_of_the_step(checkpoint: Path, recompute: str) -> None:
    trainer = make_trainer(checkpoint, trainer={"recompute": recompute})
    batch = make_batch(old=False)
    step = make_step(30)
    batch["old_log_probs"] = trainer.forward("actor", Schedule((step,)), batch, ("log_probs",))["log_probs"]
    result = trainer.step("actor", step, batch)
    assert result.metrics["old_log_prob_diff"] == 0.0
    assert result.metrics["ratio"] == 1.0


def test_without_old_log_probs_the_ratio_is_exactly_one(checkpoint: Path) -> None:
    result = make_trainer(checkpoint).step("actor", make_step(30), make_batch(old=False))
    assert result.metrics["ratio"] == 1.0
    assert result.metrics["old_log_prob_diff"] == 0.0


def test_a_value_is_read_at_the_token_before_and_not_divided_by_temperature(checkpoint: Path) -> None:
    trainer = make_trainer(checkpoint, critic=True)
    policy = trainer._trained["critic"].policy
    head = policy.value_head
    assert head is not None
    lengths = torch.tensor([4, 3])
    columns = {
        "tokens": torch.tensor([3, 1, 4, 1, 5, 9, 2], dtype=torch.int32),
        "mask": torch.tensor([0, 1, 0, 1, 0, 0, 1], dtype=torch.bool),
    }
    values = trainer.forward(
        "critic", Schedule((StepSchedule((((1,), (0,)),), 7),)), Batch(lengths, columns), ("values",)
    )["values"]
    plain = AutoModelForCausalLM.from_pretrained(checkpoint).model
    with torch.no_grad():
        states = [plain(torch.tensor([tokens])).last_hidden_state[0] for tokens in ([3, 1, 4, 1], [5, 9, 2])]
    read = [states[0] @ head.weight[0].detach(), states[1] @ head.weight[0].detach()]
    expected = torch.tensor([0, read[0][0], 0, read[0][2], 0, 0, read[1][1]])
    torch.testing.assert_close(values, expected, rtol=1e-5, atol=1e-6)


def test_the_value_head_comes_from_the_seed_and_is_small(checkpoint: Path) -> None:
    def head(seed: int) -> Tensor:
        value_head = make_trainer(checkpoint, critic=True, run={"seed": seed})._trained["critic"].policy.value_head
        assert value_head is not None
        return value_head.weight.detach()

    assert torch.equal(head(1), head(1))
    assert not torch.equal(head(1), head(2))
    assert float(head(1).abs().max()) < 4 / 17


@pytest.mark.parametrize("column", ["advantages", "weights"])
def test_a_step_that_is_not_finite_changes_nothing(checkpoint: Path, column: str) -> None:
    trainer = make_trainer(checkpoint, optimizer={"warmup_steps": 4, "clip_grad": 1.0})
    undisturbed = make_trainer(checkpoint, optimizer={"warmup_steps": 4, "clip_grad": 1.0})
    for each in (trainer, undisturbed):
        assert not each.step("actor", make_step(), make_batch()).skipped
    broken = make_batch()
    broken[column][int(broken["mask"].nonzero()[3])] = float("nan") if column == "advantages" else float("inf")
    assert trainer.step("actor", make_step(30), broken).skipped
    results = [each.step("actor", make_step(), make_batch()) for each in (trainer, undisturbed)]
    assert results[0] == results[1]
    assert results[0].metrics["lr"] == pytest.approx(0.5e-2)
    left, right = (each._trained["actor"].optimizer.weights() for each in (trainer, undisturbed))
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_a_resumed_run_goes_on_bit_for_bit(checkpoint: Path, tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    settings = {"optimizer": {"name": name, "warmup_steps": 3, "schedule": "cosine"}}
    first = make_trainer(checkpoint, dtype, critic=True, **settings)
    for role in ("actor", "critic"):
        first.step(role, make_step(30), make_batch())
    torch.manual_seed(11)
    first.save(tmp_path)
    expected = torch.rand(3)
    second = make_trainer(checkpoint, dtype, critic=True, **settings)
    second.load(tmp_path)
    assert torch.equal(torch.rand(3), expected)
    for role in ("actor", "critic"):
        for _ in range(2):
            results = [each.step(role, make_step(30), make_batch()) for each in (first, second)]
            assert results[0] == results[1]
        left, right = (each._trained[role].optimizer.weights() for each in (first, second))
        assert all(torch.equal(left[key], right[key]) for key in left)


def test_a_checkpoint_of_something_else_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    trainer = make_trainer(checkpoint)
    trainer.step("actor", make_step(), make_batch())
    trainer.save(tmp_path)
    with pytest.raises(CheckpointError, match="is of optimizer 'adam', this run's is 'sgd'"):
        make_trainer(checkpoint, optimizer={"name": "sgd"}).load(tmp_path)
    with pytest.raises(CheckpointError, match=r"torch.float32, this run's .* torch.bfloat16"):
        make_trainer(checkpoint, torch.bfloat16).load(tmp_path)
    with pytest.raises(CheckpointError, match="missing"):
        make_trainer(checkpoint, critic=True).load(tmp_path)


def test_init_from_takes_weights_alone(checkpoint: Path, tmp_path: Path) -> None:
    other = make_trainer(checkpoint)
    other.step("actor", make_step(), make_batch())
    (tmp_path / "trainer").mkdir()
    other.save(tmp_path / "trainer")
    trainer = make_trainer(checkpoint, checkpoint={"init_from": str(tmp_path)})
    left, right = trainer._trained["actor"].optimizer.weights(), other._trained["actor"].optimizer.weights()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert trainer._trained["actor"].optimizer.num_steps == 0


def test_the_source_has_the_checkpoints_names(checkpoint: Path) -> None:
    from safetensors.torch import load_file

    trainer = make_trainer(checkpoint, critic=True)
    saved = load_file(checkpoint / "model.safetensors")
    source = trainer.source("actor")
    yielded = dict(source.tensors())
    assert yielded.keys() == saved.keys()
    assert all(torch.equal(yielded[name], saved[name]) for name in saved)
    assert [spec.name for spec in source.specs()] == list(yielded)
    assert all(spec.shape == tuple(yielded[spec.name].shape) for spec in source.specs())
    assert [shard.name for shard in source.shards()] == list(yielded)
    trainer.step("actor", make_step(), make_batch())
    assert not torch.equal(dict(source.tensors())["model.norm.weight"], saved["model.norm.weight"])
    critic = set(dict(trainer.source("critic").tensors())) - saved.keys()
    assert critic == {"value_head.weight", "value_head.bias"}


def test_offloaded_parts_may_not_be_used(checkpoint: Path) -> None:
    trainer = make_trainer(checkpoint)
    trainer.step("actor", make_step(), make_batch())
    trainer.offload("actor", ("optimizer", "gradients"))
    trainer.forward("actor", Schedule((make_step(),)), make_batch(), ("log_probs",))
    with pytest.raises(PhaseError, match="the actor's gradients and optimizer are offloaded"):
        trainer.step("actor", make_step(), make_batch())
    trainer.offload("actor", ("weights",))
    with pytest.raises(PhaseError, match="the actor's weights are offloaded"):
        trainer.forward("actor", Schedule((make_step(),)), make_batch(), ("log_probs",))
    trainer.onload("actor", ("weights", "gradients", "optimizer"))
    assert not trainer.step("actor", make_step(), make_batch()).skipped


def test_filler_and_untrainable_samples_cost_nothing_and_change_nothing(checkpoint: Path) -> None:
    batch = make_batch()
    full = make_trainer(checkpoint)
    full.step("actor", StepSchedule((((0, 1), (2, 5)),), 27), batch)
    filled = make_trainer(checkpoint)
    filled.step("actor", StepSchedule((((0, 1), (2,), (5,), ()),), 27), batch)
    assert distance(gradients(filled), gradients(full)) < 1e-6
    alone = make_trainer(checkpoint)
    result = alone.step("actor", StepSchedule((((), ()),), 0), batch)
    assert result.metrics["loss"] == 0.0
    assert result.metrics["grad_norm"] == 0.0


def test_bfloat16_weights_have_float32_masters(checkpoint: Path) -> None:
    trainer = make_trainer(checkpoint, torch.bfloat16, optimizer={"lr": 1e-5, "weight_decay": 0.0})
    before = {name: weight.clone() for name, weight in trainer._trained["actor"].optimizer.weights().items()}
    for _ in range(3):
        trainer.step("actor", make_step(30), make_batch())
    after = trainer._trained["actor"].optimizer.weights()
    masters = trainer._trained["actor"].optimizer.state()
    assert all(masters[f"master.{name}"].dtype == torch.float32 for name in after)
    # Steps of 1e-5 are lost on bfloat16 weights of order 1, but not on their masters.
    norm = "model.norm.weight"
    assert torch.equal(after[norm], before[norm])
    assert not torch.equal(masters[f"master.{norm}"], before[norm].float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, world_size=2), "the plan has 2 ranks, the torch trainer was started on 1"),
        (lambda plan: plan, "0.0 is greedy"),
    ],
)
def test_plans_it_cannot_serve(checkpoint: Path, change: Callable[[Plan], Plan], message: str) -> None:
    plan = change(make_plan(checkpoint, rollout={"temperature": 0.0}))
    with pytest.raises(ConfigError, match=message):
        TorchTrainer(plan, recipe=Recipe(), algorithm=Clip(), device=CPU, dtype=torch.float32)


def test_untrained_roles_and_missing_value_heads_are_named(checkpoint: Path) -> None:
    trainer = make_trainer(checkpoint)
    with pytest.raises(ValueError, match="role 'critic' is not trained in this run"):
        trainer.step("critic", make_step(), make_batch())
    with pytest.raises(ValueError, match="only the critic has one"):
        trainer.forward("actor", Schedule((make_step(),)), make_batch(), ("values",))
    with pytest.raises(ConfigError, match=r"teacher.path"):
        trainer.forward("teacher", Schedule((make_step(),)), make_batch(), ("log_probs",))
    assert len(trainer.world.ranks) == 1
    trainer.close()
