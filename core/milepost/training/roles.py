"""The roles a torch trainer holds: models that are trained, with their optimizer, and frozen ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from milepost.errors import PhaseError
from milepost.recipe import HFModel
from milepost.training.logprobs import HeadSettings, token_log_probs
from milepost.training.norms import speed_up_norms
from milepost.training.optimizer import Optimizer, OptimizerSettings, relocate
from milepost.training.packing import Packed
from milepost.training.trainer import Part, Role, Want

PARTS: tuple[Part, ...] = ("weights", "gradients", "optimizer")


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
        values = torch.addmm(self.bias, hidden.to(self.weight.dtype), self.weight.t())
        return values.squeeze(1)


class Policy:
    """What a role's model says about a packed row."""

    def __init__(self, model: HFModel, temperature: float, value_head: ValueHead | None = None) -> None:
        self.hf = model
        self.value_head = value_head
        self.head_weight = cast("Tensor", model.head.weight)
        """[V, H]."""
        self.head_bias = cast("Tensor | None", getattr(model.head, "bias", None))
        self.settings = HeadSettings(temperature, model.logit_scale, model.softcap)
        # Dropout would make log-probs irreproducible, and the ratio never exactly 1.
        model.model.eval()
        speed_up_norms(model.model)

    def evaluate(self, packed: Packed, want: Collection[Want]) -> dict[Want, Tensor]:
        """Return one column [n] per wanted name over the trainable tokens of the row, each read one token before.

        Log-probs and entropy are of logits / temperature; values are read as they are. Where nothing is trainable the
        model does not run, and the empty columns carry no gradient.
        """
        if not len(packed.targets):
            return {name: torch.zeros(0, device=packed.targets.device) for name in want}
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
                bias=self.head_bias,
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


class TrainedRole:
    """A model and its optimizer."""

    def __init__(self, role: Role, policy: Policy, settings: OptimizerSettings, device: torch.device) -> None:
        self.role = role
        self.policy = policy
        self._device = device
        self._on_device = set(PARTS)
        self.optimizer = Optimizer(self._trainable(), settings)

    def _trainable(self) -> dict[str, nn.Parameter]:
        """Parameters by checkpoint name: the whole model of a policy, body and value head of a critic."""
        hf, head = self.policy.hf, self.policy.value_head
        parameters = {name: p for name, p in hf.model.named_parameters() if p.requires_grad}
        if head is None:
            return parameters
        in_body = {id(p) for p in hf.body.parameters()}
        for name in [name for name, p in parameters.items() if id(p) not in in_body]:
            parameters.pop(name).requires_grad_(False)
        return parameters | {f"value_head.{name}": p for name, p in head.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        """The trained parameters by name."""
        return {
            name: parameter.detach()
            for group in self.optimizer.groups
            for name, parameter in zip(group.names, group.parameters, strict=True)
        }

    def require(self, *parts: Part) -> None:
        """Raise PhaseError if one of these parts is not on the device."""
        missing = [part for part in parts if part not in self._on_device]
        if missing:
            raise PhaseError(f"the {self.role}'s {' and '.join(missing)} are offloaded; onload them first")

    def offload(self, parts: Collection[Part]) -> None:
        """Move parts to host memory; on a CPU they stay, but are no more to be used."""
        for part in self._on_device & set(parts):
            self.optimizer.move(part, torch.device("cpu"))
            self._on_device.discard(part)

    def onload(self, parts: Collection[Part]) -> None:
        """Bring parts back to the device."""
        for part in set(parts) - self._on_device:
            self.optimizer.move(part, self._device)
            self._on_device.add(part)


class FrozenRole:
    """A model that is only asked; on a GPU its weights lie in host memory and are swapped in while it is."""

    def __init__(self, policy: Policy, device: torch.device) -> None:
        self.policy = policy
        self._device = device
        self._parameters = list(policy.hf.model.parameters())
        for parameter in self._parameters:
            parameter.requires_grad_(False)
        self._host = [parameter.data for parameter in self._parameters]
        if device.type != "cpu":
            self._host = [weight.pin_memory() for weight in self._host]
            for buffer in policy.hf.model.buffers():
                buffer.data = buffer.data.to(device)

    def __enter__(self) -> Policy:
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = relocate(host, self._device)
        return self.policy

    def __exit__(self, *exception: object) -> None:
        for parameter, host in zip(self._parameters, self._host, strict=True):
            parameter.data = host
