import math
from typing import Any

import pytest
import torch
from milepost.config.schema import CriticSection, OptimizerSection
from milepost.errors import CheckpointError
from milepost.training.optimizer import Optimizer, OptimizerSettings, lr_at
from torch import Tensor, nn


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"matrix": (3, 4), "bias": (4,), "other": (2, 2), "norm": (3,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def loss_of(parameters: dict[str, nn.Parameter], scale: float) -> Tensor:
    total = torch.zeros(())
    for position, parameter in enumerate(parameters.values()):
        total = total + ((position + 1) * scale * parameter.float()).sin().sum()
    return total


@pytest.mark.parametrize("clip_grad", [0.0, 0.5])
def test_steps_equal_torch_adamw(clip_grad: float) -> None:
    mine, plain = parameters(), parameters()
    settings = OptimizerSettings(lr=0.01, weight_decay=0.1, betas=(0.8, 0.9), eps=1e-6, clip_grad=clip_grad)
    optimizer = Optimizer(mine, settings)
    groups = [
        {"params": [plain["matrix"], plain["other"]], "weight_decay": 0.1},
        {"params": [plain["bias"], plain["norm"]], "weight_decay": 0.0},
    ]
    expected = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9), eps=1e-6, foreach=False, fused=False)
    for step in range(5):
        optimizer.zero_gradients()
        loss_of(mine, 0.7 + step).backward()
        norm = optimizer.gradient_norm()
        optimizer.step(norm)
        expected.zero_grad()
        loss_of(plain, 0.7 + step).backward()
        plain_norm = torch.nn.utils.clip_grad_norm_(plain.values(), clip_grad or math.inf)
        expected.step()
        assert norm == pytest.approx(float(plain_norm), rel=1e-6)
    for name in mine:
        torch.testing.assert_close(mine[name], plain[name], rtol=1e-5, atol=1e-7)


def test_gradients_add_up_over_backward_passes_and_begin_anew() -> None:
    mine = parameters()
    optimizer = Optimizer(mine, OptimizerSettings())
    for _ in range(2):
        optimizer.zero_gradients()
        for _ in range(3):
            mine["bias"].sum().backward()
        assert optimizer.gradient_norm() == pytest.approx(6.0)  # four elements of 3


def test_sgd_by_hand() -> None:
    weight = nn.Parameter(torch.tensor([[2.0, 4.0]]))
    optimizer = Optimizer({"w": weight}, OptimizerSettings(name="sgd", lr=0.5, weight_decay=0.1, clip_grad=0.0))
    optimizer.zero_gradients()
    weight.sum().backward()
    optimizer.step(optimizer.gradient_norm())
    # 2 - .5 (1 + .2), 4 - .5 (1 + .4)
    torch.testing.assert_close(weight.detach(), torch.tensor([[1.4, 3.3]]))


def test_clipping_by_hand() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = Optimizer({"w": weight}, OptimizerSettings(name="sgd", lr=1.0, clip_grad=1.0))
    optimizer.zero_gradients()
    (weight * torch.tensor([3.0, 4.0])).sum().backward()
    norm = optimizer.gradient_norm()
    assert norm == 5.0
    optimizer.step(norm)
    torch.testing.assert_close(weight.detach(), torch.tensor([-0.6, -0.8]))


def test_bfloat16_gradients_are_summed_in_float32() -> None:
    weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    optimizer = Optimizer({"w": weight}, OptimizerSettings(name="sgd", lr=0.0))
    optimizer.zero_gradients()
    for _ in range(1000):
        weight.sum().backward()
    # In bfloat16 the sum would stop at 256.
    assert optimizer.gradients()[0].tolist() == [1000.0, 1000.0]
    assert weight.grad is None


SHAPE: dict[str, Any] = {"lr": 8.0, "warmup_steps": 4, "decay_steps": 12, "min_lr": 2.0}


@pytest.mark.parametrize(
    ("schedule", "step", "expected"),
    [
        ("constant", 0, 2.0),
        ("constant", 3, 8.0),
        ("constant", 100, 8.0),
        ("linear", 1, 4.0),
        ("linear", 4, 8.0),
        ("linear", 8, 5.0),
        ("linear", 12, 2.0),
        ("linear", 99, 2.0),
        ("cosine", 4, 8.0),
        ("cosine", 6, 2.0 + 6.0 * 0.5 * (1 + math.sqrt(0.5))),
        ("cosine", 8, 5.0),
        ("cosine", 12, 2.0),
    ],
)
def test_learning_rate_by_hand(schedule: Any, step: int, expected: float) -> None:
    assert lr_at(step, schedule=schedule, **SHAPE) == pytest.approx(expected)


def test_no_room_to_decay_goes_to_the_end() -> None:
    assert lr_at(4, schedule="linear", lr=8.0, warmup_steps=4, decay_steps=3, min_lr=2.0) == 2.0


def test_settings_fall_back_to_the_actors() -> None:
    section = OptimizerSection(lr=1e-3, weight_decay=0.2, schedule="linear", warmup_steps=5, clip_grad=2.0)
    actor = OptimizerSettings.of(section, 40)
    assert (actor.lr, actor.decay_steps, actor.clip_grad) == (1e-3, 40, 2.0)
    critic = OptimizerSettings.of(section, 40, CriticSection(lr=1e-2, warmup_steps=0))
    assert (critic.lr, critic.warmup_steps, critic.weight_decay, critic.schedule) == (1e-2, 0, 0.2, "linear")
    assert OptimizerSettings.of(OptimizerSection(decay_steps=7), 40).decay_steps == 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_is_named_by_parameter_and_comes_back(dtype: torch.dtype) -> None:
    first = parameters(dtype)
    optimizer = Optimizer(first, OptimizerSettings(lr=0.1))
    optimizer.zero_gradients()
    loss_of(first, 1.0).backward()
    optimizer.step(optimizer.gradient_norm())
    state = optimizer.state()
    kinds = {"exp_avg", "exp_avg_sq"} | ({"master"} if dtype == torch.bfloat16 else set())
    assert state.keys() == {f"{kind}.{name}" for kind in kinds for name in first}
    assert all(value.shape == first[key.split(".")[1]].shape for key, value in state.items())

    second = parameters(dtype)
    other = Optimizer(second, OptimizerSettings(lr=0.1))
    other.load_state(state, 1)
    assert other.num_steps == 1
    assert all(torch.equal(other.state()[key], state[key]) for key in state)
    with pytest.raises(CheckpointError, match="does not fit this run"):
        other.load_state({key: value for key, value in state.items() if "bias" not in key}, 1)
    with pytest.raises(CheckpointError, match=r"exp_avg.bias is \(5,\)"):
        other.load_state(state | {"exp_avg.bias": torch.zeros(5)}, 1)


def test_no_parameters_is_an_error() -> None:
    with pytest.raises(ValueError, match="no parameters were given"):
        Optimizer({}, OptimizerSettings())
