from typing import Any

import pytest
import torch
from milepost.training.logprobs import HeadSettings, chunk_rows, token_log_probs
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def plain(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, settings: HeadSettings
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    logits = logits * settings.logit_scale
    if settings.softcap is not None:
        logits = settings.softcap * torch.tanh(logits / settings.softcap)
    log_softmax = (logits / settings.temperature).log_softmax(-1)
    entropy = -(log_softmax.exp() * log_softmax).sum(-1)
    return log_softmax.gather(1, targets[:, None])[:, 0], entropy


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, dtype=dtype)
    weight = torch.randn(11, 5, generator=generator, dtype=dtype)
    bias = torch.randn(11, generator=generator, dtype=dtype)
    targets = torch.randint(0, 11, (7,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def test_by_hand() -> None:
    # Logits [ln 1, ln 3] over temperature 1/2 give odds 1 : 9.
    log_probs, entropy = token_log_probs(
        torch.tensor([[1.0]]),
        torch.tensor([[1.0], [3.0]]).log(),
        torch.tensor([1]),
        settings=HeadSettings(temperature=0.5),
        entropy=True,
    )
    assert log_probs.item() == pytest.approx(-0.1053605)
    assert entropy is not None
    assert entropy.item() == pytest.approx(0.3250830)


@pytest.mark.parametrize("elements", [11, 33, 1000])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(
    "shape",
    [{}, {"temperature": 0.7}, {"temperature": 1.3, "logit_scale": 0.5, "softcap": 3.0}],
    ids=["plain", "temperature", "softcap"],
)
def test_values_and_gradients_equal_plain_log_softmax(elements: int, with_bias: bool, shape: dict[str, float]) -> None:
    hidden, weight, bias, targets = inputs()
    settings = HeadSettings(**shape, chunk_elements=elements)
    used = bias if with_bias else None
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    upstream = torch.linspace(-1, 1, 7, dtype=torch.float64), torch.linspace(2, -1, 7, dtype=torch.float64)

    log_probs, entropy = token_log_probs(hidden, weight, targets, bias=used, settings=settings, entropy=True)
    gradients = torch.autograd.grad((log_probs, entropy), leaves, upstream)
    expected = plain(hidden, weight, targets, used, settings)
    expected_gradients = torch.autograd.grad(expected, leaves, upstream)

    torch.testing.assert_close((log_probs, entropy), expected, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("elements", [22, 1000])
def test_gradcheck(elements: int) -> None:
    hidden, weight, bias, targets = inputs()
    settings = HeadSettings(temperature=0.8, softcap=2.0, chunk_elements=elements)

    def function(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        return token_log_probs(hidden, weight, targets, bias=bias, settings=settings, entropy=True)

    assert torch.autograd.gradcheck(function, (hidden, weight, bias))


def test_bfloat16_logits_are_normalised_in_float32() -> None:
    hidden, weight, _, targets = inputs(torch.bfloat16)
    log_probs, _ = token_log_probs(hidden, weight, targets)
    assert log_probs.dtype == torch.float32
    logits = (hidden @ weight.t()).float()
    torch.testing.assert_close(log_probs, logits.log_softmax(-1).gather(1, targets[:, None])[:, 0])
    log_probs.sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.bfloat16


def test_impossible_tokens_have_no_entropy_and_no_nan() -> None:
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[0.0], [float("-inf")]])
    log_probs, entropy = token_log_probs(hidden, weight, torch.tensor([0]), entropy=True)
    assert log_probs.item() == 0
    assert entropy is not None
    assert entropy.item() == 0


class LargestTensor(TorchDispatchMode):
    """Records the most elements any operation, forward or backward, put out."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out


def test_no_operation_puts_out_more_than_a_chunk_of_logits() -> None:
    rows, vocab, width = 512, 1000, 8
    hidden = torch.randn(rows, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    targets = torch.randint(0, vocab, (rows,))
    settings = HeadSettings(chunk_elements=16 * vocab)
    assert chunk_rows(rows, vocab, hidden.device, settings) == 16
    with LargestTensor() as largest:
        log_probs, entropy = token_log_probs(hidden, weight, targets, settings=settings, entropy=True)
        assert entropy is not None
        (log_probs.sum() + entropy.sum()).backward()
    assert largest.elements == 16 * vocab
    with LargestTensor() as largest:
        plain(hidden, weight, targets, None, HeadSettings())
    assert largest.elements == rows * vocab


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_temperature_must_be_positive(temperature: float) -> None:
    with pytest.raises(ValueError, match="expected more than 0"):
        HeadSettings(temperature=temperature)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"expected \[n, H\], \[V, H\] and \[n\]"):
        token_log_probs(torch.zeros(2, 3), torch.zeros(5, 4), torch.zeros(2, dtype=torch.int64))
