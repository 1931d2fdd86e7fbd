"""The weights of a Megatron model under Hugging Face names, gathered over tensor, pipeline and expert parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from milepost.recipe import MegatronModel
from milepost.training.megatron.model import VALUE_HEAD, PolicyModel, rules_by_name
from milepost.weights.conversion import Conversion
from milepost.weights.transport import Shard, TensorSpec


class MegatronSource:
    """A `WeightSource` of one role, the same order on every rank.

    Args:
        pieces: this rank's pieces of the model.
        description: the model's rules.
        dtype: of its weights.
        value: what to yield of each parameter; by default what it holds.
    """

    def __init__(
        self,
        pieces: Sequence[PolicyModel],
        description: MegatronModel,
        dtype: torch.dtype,
        value: Callable[[Tensor], Tensor] = Tensor.detach,
    ) -> None:
        self._held: dict[str, Tensor] = {}
        self._critic = pieces[0].value_head
        for piece in pieces:
            parameters = dict(piece.named_parameters())
            for local, name in piece.canonical_names().items():
                self._held[name] = value(parameters[local])
        rules = rules_by_name(description)
        if self._critic:
            rules.pop("output_layer.weight", None)
        self._rules: list[Conversion] = list(rules.values())
        self._dtype = dtype
        self._num_experts = int(description.transformer.get("num_moe_experts") or 0)
        hidden = description.transformer["hidden_size"]
        self._value_head: dict[str, tuple[int, ...]] = {}
        if self._critic:
            self._value_head = {"output_layer.weight": (1, hidden), "output_layer.bias": (1,)}

    def specs(self) -> Sequence[TensorSpec]:
        """Names, shapes and dtypes of all tensors, in the order `tensors` yields them, without digests."""
        name = str(self._dtype).removeprefix("torch.")
        specs = [TensorSpec(part.name, part.shape, name) for rule in self._rules for part in rule.parts]
        return specs + [TensorSpec(VALUE_HEAD[key], shape, name) for key, shape in self._value_head.items()]

    @torch.no_grad()
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors, gathered over tensor, pipeline and expert parallelism; called on all ranks."""
        owners = self._owners()
        for rule in self._rules:
            yield from zip((part.name for part in rule.parts), self._whole(rule, owners[rule.megatron]), strict=True)
        for name, shape in self._value_head.items():
            held = self._held.get(name)
            value = torch.empty(shape, dtype=self._dtype, device=self._device()) if held is None else held
            yield VALUE_HEAD[name], self._from_owner(value, owners[name])

    @torch.no_grad()
    def stage_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole tensors that this rank's pipeline stage holds first, gathered over tensor and expert
        parallelism alone.

        Called on all ranks.
        """
        owners = self._owners()
        mine = parallel_state.get_pipeline_model_parallel_rank()
        for rule in self._rules:
            if owners[rule.megatron] == mine:
                yield from zip((part.name for part in rule.parts), self._on_stage(rule), strict=True)
        for name in self._value_head:
            if owners[name] == mine:
                yield VALUE_HEAD[name], self._held[name]

    def shards(self) -> Iterator[Shard]:
        """Yield the slices this rank holds."""
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
        for rule in self._rules:
            if rule.megatron in self._held:
                share = size if rule.split is not None else 1
                cuts = rule.divide(self._held[rule.megatron], rank, share)
                for part, cut in zip(rule.parts, cuts, strict=True):
                    yield Shard(part.name, part.shape, rule.cut(part, rank, share), cut)
        for name, shape in self._value_head.items():
            if name in self._held:
                slices = tuple((0, extent) for extent in shape)
                yield Shard(VALUE_HEAD[name], shape, slices, self._held[name])

    def _device(self) -> torch.device:
        return next(iter(self._held.values())).device

    def _owners(self) -> dict[str, int]:
        """Return the first pipeline stage that holds each tensor."""
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        on_stage = [name for held in _gather(list(self._held), self._expert_group()) for name in held]
        names = _gather(on_stage, pipeline)
        owners: dict[str, int] = {}
        for stage, held in enumerate(names):
            for name in held:
                owners.setdefault(name, stage)
        return owners

    def _whole(self, rule: Conversion, owner: int) -> list[Tensor]:
        """Return the whole Hugging Face tensors of a rule."""
        if parallel_state.get_pipeline_model_parallel_rank() == owner:
            wholes = self._on_stage(rule)
        else:
            wholes = [torch.empty(part.shape, dtype=self._dtype, device=self._device()) for part in rule.parts]
        return [self._from_owner(whole, owner) for whole in wholes]

    def _on_stage(self, rule: Conversion) -> list[Tensor]:
        """Return the whole Hugging Face tensors of a rule, on the ranks of the stage that holds it."""
        if rule.expert is not None:
            return self._of_expert(rule, rule.expert)
        size = parallel_state.get_tensor_model_parallel_world_size() if rule.split is not None else 1
        mine = self._held[rule.megatron]
        shards = [mine]
        if size > 1:
            shards = [torch.empty_like(mine) for _ in range(size)]
            dist.all_gather(shards, mine.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
        return rule.join(shards)

    def _of_expert(self, rule: Conversion, expert: int) -> list[Tensor]:
        """Return the whole Hugging Face tensors of an expert's rule from the expert-parallel rank that has it."""
        group = self._expert_group()
        owner = expert * dist.get_world_size(group) // self._num_experts
        if dist.get_rank(group) == owner:
            parts = rule.divide(self._held[rule.megatron])
        else:
            parts = [torch.empty(part.shape, dtype=self._dtype, device=self._device()) for part in rule.parts]
        return [_broadcast(part, owner, group) for part in parts]

    @staticmethod
    def _expert_group() -> dist.ProcessGroup:
        group: dist.ProcessGroup = parallel_state.get_expert_model_parallel_group()
        return group

    @staticmethod
    def _from_owner(tensor: Tensor, owner: int) -> Tensor:
        return _broadcast(tensor, owner, parallel_state.get_pipeline_model_parallel_group())


def _broadcast(tensor: Tensor, owner: int, group: dist.ProcessGroup) -> Tensor:
    """Return the tensor of one rank of a group, which is numbered within it, on all its ranks."""
    if dist.get_world_size(group) > 1:
        tensor = tensor.contiguous()
        dist.broadcast(tensor, src=dist.get_global_rank(group, owner), group=group)
    return tensor


def _gather(names: list[str], group: dist.ProcessGroup) -> list[list[str]]:
    """Return the names of every rank of a group."""
    gathered: list[list[str]] = [[] for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(gathered, names, group=group)
    return gathered
