"""What a model says about packed rows: log-probs, entropy and values of their trainable tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from milepost.recipe import HFModel
from milepost.training.logprobs import HeadSettings, token_log_probs
from milepost.training.norms import speed_up_norms
from milepost.training.packing import Packed
from milepost.training.trainer import Want


class ValueHead(nn.Module):
    """Reads a value off each hidden state: [n, H] to [n], in float32 at least.

    Initial weights are normal with standard deviation 1 / (H + 1), so that values start near 0 (Stiennon et al., 2020,
    arXiv 2009.01325); drawn on the CPU from a generator of their own, so that they depend on the seed alone.
    """

    def __init__(self, hidden_size: int, *, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(1, hidden_size, generator=generator, dtype=torch.float64) / (hidden_size + 1)
        dtype = torch.promote_types(torch.float32, dtype)
        self.weight = nn.Parameter(weight.to(device, dtype))
        self.bias = nn.Parameter(torch.zeros(1, device=device, dtype=dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the value of each state."""
        return torch.addmv(self.bias, hidden.to(self.weight.dtype), self.weight[0])


class Policy(nn.Module):
    """What a role's model says about a packed row.

    A module, so that what prepares parameters when a module runs (FSDP2) does so for the head, too, whose weight is
    read without running it.
    """

    def __init__(self, model: HFModel, temperature: float, value_head: ValueHead | None = None) -> None:
        super().__init__()
        self.hf = model
        self.model = model.model
        self.value_head = value_head
        self.settings = HeadSettings(temperature, model.logit_scale, model.softcap)
        # Dropout would make log-probs irreproducible, and the ratio never exactly 1.
        model.model.eval()
        speed_up_norms(model.model)

    @property
    def head_weight(self) -> Tensor:
        """[V, H], as it is now: sharding puts another tensor in its place while the policy runs."""
        return cast("Tensor", self.hf.head.weight)

    def named_tensors(self) -> dict[str, Tensor]:
        """Tensors of the model by their checkpoint names, and the value head's."""
        tensors: dict[str, Tensor] = self.hf.model.state_dict(keep_vars=True)
        return tensors | self.value_parameters()

    def value_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of the value head by checkpoint name; none where there is no value head."""
        head = self.value_head
        return {} if head is None else {f"value_head.{name}": p for name, p in head.named_parameters()}

    def evaluate(self, packed: Packed, want: Collection[Want]) -> dict[Want, Tensor]:
        """Return one column [n] per wanted name over the trainable tokens of the row, each read one token before.

        Log-probs and entropy are of logits / temperature; values are read as they are. Where nothing is trainable the
        model does not run, and the empty columns carry no gradient.
        """
        if not len(packed.targets):
            return {name: torch.zeros(0, device=packed.targets.device) for name in want}
        columns: dict[Want, Tensor] = self(packed, want)
        return columns

    def forward(self, packed: Packed, want: Collection[Want]) -> dict[Want, Tensor]:
        """Do what `evaluate` says for a row with trainable tokens."""
        before = self._hidden_states(packed).index_select(0, packed.trainable - 1)
        columns: dict[Want, Tensor] = {}
        if "values" in want:
            if self.value_head is None:
                raise ValueError("values were asked of a role without a value head; only the critic has one")
            columns["values"] = self.value_head(before)
        if "log_probs" in want or "entropy" in want:
            log_probs, entropy = token_log_probs(
                before,
                self.head_weight,
                packed.targets,
                bias=cast("Tensor | None", getattr(self.hf.head, "bias", None)),
                settings=self.settings,
                entropy="entropy" in want,
            )
            columns["log_probs"] = log_probs
            if entropy is not None:
                columns["entropy"] = entropy
        return {name: columns[name] for name in want}

    def _hidden_states(self, packed: Packed) -> Tensor:
        """Run the body over a row of T tokens: [T, H]."""
        length = packed.layout.equal_length
        if self.hf.batch_body is not None and length is not None and not packed.tokens.is_cuda:
            return self.hf.batch_body(packed.tokens.view(-1, length)).flatten(0, 1)
        output: Any = self.hf.body(
            input_ids=packed.tokens, position_ids=packed.layout.positions, use_cache=False, packing=packed.layout
        )
        hidden: Tensor = output if isinstance(output, Tensor) else output.last_hidden_state
        return hidden[0]
