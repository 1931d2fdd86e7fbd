"""Kernels that a GPU gets, as the plain operations that they are compiled from."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from milepost.training import kernels, streamed
from milepost.training.kernels import (
    KERNELS,
    add_product,
    fused,
    has_accumulating_product,
    kernel_names,
    only,
    rms_norm,
)
from milepost.training.logprobs import HeadSettings, token_log_probs
from torch import Tensor

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(5, 24, generator=generator).to(dtype) for _ in range(2))
    weight = torch.randn(24, generator=generator).to(dtype)

    def run(norm: Any) -> list[Tensor]:
        inputs = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        out = norm(*inputs)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    expected = run(lambda x, weight: F.rms_norm(x, weight.shape, weight, 1e-6))
    for got, want in zip(run(lambda x, weight: rms_norm(x, weight, 1e-6)), expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, want)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compiled on a GPU, as it stands."""
    for name in ("read_logits", "logits_grad", "logits_grad_with_entropy"):
        monkeypatch.setattr(streamed, f"{name}_fused", getattr(streamed, name))


@pytest.mark.parametrize("rows", [4, 9])
@pytest.mark.parametrize("entropy_grad", [False, True])
def test_streamed_head_is_the_head(plain: None, rows: int, entropy_grad: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(9, 16, generator=generator), torch.randn(50, 16, generator=generator)
    targets = torch.randint(0, 50, (9,), generator=generator)
    scales = torch.linspace(-1.0, 1.0, 9)

    def run(head: Any) -> list[Tensor]:
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        log_probs, entropy = head(*inputs)
        loss = (log_probs * scales).sum() + (entropy * scales.flip(0)).sum() * entropy_grad
        return [log_probs, entropy, *torch.autograd.grad(loss, inputs)]

    settings = HeadSettings(temperature=0.8, logit_scale=0.5, chunk_elements=rows * 50)
    want = run(lambda h, w: token_log_probs(h, w, targets, settings=settings, entropy=True))
    found = run(lambda h, w: streamed.streamed_log_probs(h, w, targets, factor=0.5 / 0.8, rows=rows, entropy=True))
    for got, expected in zip(found, want, strict=True):
        torch.testing.assert_close(got, expected, atol=2e-6, rtol=1e-5)


def test_an_impossible_token_has_no_part_in_the_entropy() -> None:
    logits = torch.tensor([[1.0, 1.0, float("-inf")]])
    targets, ones = torch.tensor([0]), torch.ones(1)
    log_probs, entropies, normalizer = streamed.read_logits(logits, targets, 1.0)
    half = math.log(2.0)
    assert [log_probs.item(), entropies.item()] == pytest.approx([-half, half])
    # d log p_0 = (1 - 1/2, -1/2, 0); d entropy = -p (log p + entropy) = 0 where both are equally likely.
    grad = streamed.logits_grad_with_entropy(logits, targets, normalizer, entropies, ones, ones, 1.0)
    assert grad[0].tolist() == pytest.approx([0.5, -0.5, 0.0])


def test_a_product_is_added_in_the_totals_precision() -> None:
    left, right = torch.ones(1, 256), torch.full((256, 1), 1.0)
    total = torch.full((1, 1), 0.5)
    add_product(total, left, right)
    assert total.item() == 256.5
    # Where no kernel does both, the product is rounded to the factors' dtype and the sum is not.
    add_product(total, left.bfloat16() * 3, right.bfloat16())
    assert total.item() == 256.5 + 768
    assert not has_accumulating_product(CPU)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("all", ("head", "norms", "accumulation", "grouped")),
        ("none", ()),
        ("all-head-norms", ("accumulation", "grouped")),
        ("norms+grouped", ("norms", "grouped")),
    ],
)
def test_kernels_by_name(text: str, names: tuple[str, ...]) -> None:
    assert kernel_names(text) == names
    before = dataclasses.asdict(KERNELS)
    with only(text):
        assert {name for name, used in dataclasses.asdict(KERNELS).items() if used} == set(names)
    assert dataclasses.asdict(KERNELS) == before


@pytest.mark.parametrize("text", ["nrom", "all-nrom", "norms+nrom"])
def test_a_kernel_there_is_none_of(text: str) -> None:
    with pytest.raises(ValueError, match="there is no kernel 'nrom', but head, norms"):
        kernel_names(text)


def test_what_cannot_be_compiled_runs_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def compiler(function: Any) -> Any:
        def fail(*arguments: Any) -> Any:
            tried.append(arguments)
            raise torch._dynamo.exc.BackendCompilerFailed(compiler, RuntimeError("no compiler"), None)

        return fail

    monkeypatch.setattr(kernels.torch, "compile", compiler)
    double = fused(lambda x: 2 * x)
    with pytest.warns(UserWarning, match="cannot be compiled here and runs slower"):
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert double(torch.ones(2)).tolist() == [2.0, 2.0]
    assert len(tried) == 1
