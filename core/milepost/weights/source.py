"""The weights of a torch module under the names its checkpoint has, for a transport or an export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
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
        state = _checkpoint_names(self._module, _untied(self._module))
        return state | {name: tensor.detach() for name, tensor in self._extra.items()}


class GatheredSource:
    """A `WeightSource` of a module whose parameters are cut over the ranks of a mesh (`DTensor`).

    Whole tensors are gathered one after the other, so every rank has to take them all, and not keep them. What
    transformers fuses on loading is taken apart tensor by tensor.

    Args:
        module: the model.
        dtypes: what the tensors are pushed in, by the module's names.
        extra: more tensors to yield behind its own, for example a value head's, in their own dtype.
    """

    def __init__(
        self, module: nn.Module, dtypes: Mapping[str, torch.dtype], extra: Mapping[str, Tensor] | None = None
    ) -> None:
        self._module = module
        self._dtypes = dtypes
        self._state = _untied(module)
        self._extra = {name: tensor.detach() for name, tensor in (extra or {}).items()}

    def specs(self) -> Sequence[TensorSpec]:
        """Names, shapes and dtypes of all tensors, in the order `tensors` yields them, without digests."""
        found = []
        for name, tensor in (self._state | self._extra).items():
            like = torch.empty(tensor.shape, dtype=self._dtypes.get(name, tensor.dtype), device="meta")
            for key, part in self._parts(name, like):
                found.append(TensorSpec(key, tuple(part.shape), str(part.dtype).removeprefix("torch.")))
        return found

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole tensors; called on all ranks."""
        for name, tensor in (self._state | self._extra).items():
            yield from self._parts(name, _whole(tensor, self._dtypes.get(name, tensor.dtype)))

    def shards(self) -> Iterator[Shard]:
        """Yield the slices of the first dimension that this rank holds.

        What has to be taken apart is gathered for it, so all ranks call this together, and hold it whole.
        """
        for name, tensor in (self._state | self._extra).items():
            like = torch.empty(tensor.shape, device="meta")
            dtype = self._dtypes.get(name, tensor.dtype)
            if not isinstance(tensor, DTensor) or [key for key, _ in self._parts(name, like)] != [name]:
                for key, part in self._parts(name, _whole(tensor, dtype)):
                    yield Shard(key, tuple(part.shape), tuple((0, extent) for extent in part.shape), part)
                continue
            local = tensor.to_local().to(dtype)
            # Cut as torch.chunk does.
            size = -(-tensor.shape[0] // tensor.device_mesh.size())
            start = min(tensor.device_mesh.get_local_rank() * size, tensor.shape[0])
            slices = ((start, start + local.shape[0]), *((0, extent) for extent in tensor.shape[1:]))
            yield Shard(name, tuple(tensor.shape), slices, local)

    def _parts(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        if name in self._extra:
            yield name, tensor
        else:
            yield from _checkpoint_names(self._module, {name: tensor}).items()


def _whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in a dtype, gathered if it is cut; on all ranks then."""
    tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _untied(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's tensors, tied ones once, under the name that comes first."""
    seen: set[int] = set()
    state: dict[str, Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            state[name] = tensor.detach()
    return state


def _checkpoint_names(module: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as the model's checkpoint has them: transformers may have fused or renamed some on loading."""
    return dict(revert_weight_conversion(module, state)) if isinstance(module, PreTrainedModel) else state
