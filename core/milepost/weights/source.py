"""The weights of a torch module under the names its checkpoint has, for a transport or an export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from milepost.weights.transport import Shard, TensorSpec


class ModuleSource:
    """A `WeightSource` of a module that one rank holds whole.

    Tied weights are yielded once, under the name that comes first, as a Hugging Face checkpoint has them. Where
    transformers fuses a checkpoint's tensors on loading (experts of a mixture), they are taken apart again; those are
    copies, everything else is the module's own memory; a source is made for one push, not kept across optimizer steps.

    Args:
        module: the model.
        extra: more tensors to yield behind its own, for example a value head's.
    """

    def __init__(self, module: nn.Module, extra: Mapping[str, Tensor] | None = None) -> None:
        self._module = module
        self._extra = dict(extra or {})

    def specs(self) -> Sequence[TensorSpec]:
        """Names, shapes and dtypes of all tensors, in the order `tensors` yields them, without digests."""
        return [
            TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._named.items()
        ]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors."""
        yield from self._named.items()

    def shards(self) -> Iterator[Shard]:
        """Yield the same tensors, each as the one shard it has."""
        for name, tensor in self._named.items():
            shape = tuple(tensor.shape)
            yield Shard(name, shape, tuple((0, extent) for extent in shape), tensor)

    @cached_property
    def _named(self) -> dict[str, Tensor]:
        seen: set[int] = set()
        state: dict[str, Tensor] = {}
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                state[name] = tensor.detach()
        if isinstance(self._module, PreTrainedModel):
            state = dict(revert_weight_conversion(self._module, state))
        return state | {name: tensor.detach() for name, tensor in self._extra.items()}
