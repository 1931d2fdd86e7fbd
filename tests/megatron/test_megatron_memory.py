"""What planning counts as a layer's activations is what torch saves for the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from megatron_cases import CPU
from megatron_world import run_world
from milepost.config.memory import Cut, kept_activations
from milepost.training.trainer import Batch
from milepost.weights.layouts import dense_layout

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
SAMPLES, LENGTH = 16, 8
CUTS = {
    "alone": Cut(),
    "selective": Cut(recompute="selective"),
    "full": Cut(recompute="full"),
    "tensor": Cut(tensor=2),
    "sequence": Cut(tensor=2, sequence=True),
    "sequence_selective": Cut(tensor=2, sequence=True, recompute="selective"),
    "context": Cut(context=2),
}


class KeepsItsInput(torch.autograd.Function):
    """What the GPU's RMS norm keeps; on a CPU torch's own is made of operations that each keep something."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        raise AssertionError("nothing goes backwards here")


def saved_bytes(model: Any, row: Any) -> int:
    """Bytes of all storages that the forward pass saves, parameters aside."""
    from milepost.training.megatron.model import run_row

    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = run_row(model, row)
    assert hidden.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def measure(rank: int) -> dict[str, float]:
    """Bytes that a layer keeps for each local token, by layout: from models of two and of four layers."""
    from megatron.core import parallel_state
    from milepost.training.megatron import layers, parallel
    from milepost.training.megatron.model import build_pieces, transformer_config
    from milepost.training.megatron.parallel import Parallelism
    from milepost.training.megatron.rows import make_row
    from milepost_qwen3.recipe import Qwen3Recipe

    layers.RMSNorm.forward = lambda self, x: KeepsItsInput.apply(x, self.weight)
    # As on a GPU, the product of gate and up keeps its input alone; it need not be compiled for that.
    torch.compiler.set_stance("force_eager")
    lengths = torch.full((SAMPLES,), LENGTH)
    tokens = torch.arange(SAMPLES * LENGTH, dtype=torch.int32) % CONFIG["vocab_size"]
    batch = Batch(lengths, {"tokens": tokens, "mask": tokens.new_zeros(len(tokens), dtype=torch.bool)})
    found = {}
    for name, cut in CUTS.items():
        layout = Parallelism(tensor=cut.tensor, context=cut.context, sequence=cut.sequence)
        parallel.initialize(layout, 0)
        place = parallel_state.get_context_parallel_rank()
        row = make_row(batch, range(SAMPLES), CPU, context=cut.context, rank=place, tensor=cut.tensor)
        total = []
        for count in (2, 4):
            description = Qwen3Recipe().megatron.describe(CONFIG | {"num_hidden_layers": count})
            config = transformer_config(description, layout, dtype=torch.float32, device=CPU, recompute=cut.recompute)
            config.bias_activation_fusion = True
            total.append(saved_bytes(build_pieces(description, config, critic=False, seed=0, device=CPU)[0], row))
        found[name] = (total[1] - total[0]) / 2 / row.tokens.shape[1]
        parallel.destroy()
    return found


def test_activations_are_what_torch_saves() -> None:
    layout = dense_layout(CONFIG | {"num_hidden_layers": 2})
    first, second = run_world(measure, 2)
    for name, cut in CUTS.items():
        expected = kept_activations(layout, cut, 4)
        if cut.context > 1:
            # On a CPU samples attend one by one, and a copy that puts their outputs together is kept too.
            expected += 4 * layout.num_heads * layout.head_dim
        # The zig-zag lets every context-parallel rank see equally many keys.
        assert first[name] == second[name], name
        assert first[name] == pytest.approx(expected, rel=0.02), name
