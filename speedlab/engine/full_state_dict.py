"""Full state dict: gather a sharded model's whole state on every rank."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from speedlab.comm import Group, doing
from speedlab.engine.module_state import EXTRA, decode, encode, entries
from speedlab.engine.state import ModelPart
from speedlab.parallel import zero
from speedlab.parallel.tensor import TensorParallel, put
from speedlab.parallel.zero import Zero


@torch.no_grad()
def full_state_dict(model_parts: Sequence[ModelPart], pipeline: Group, *, masters: bool = True) -> dict[str, Any]:
    """Gather parameters, persistent buffers, extra states and quantised parameters. Collective over all ranks.

    1. Partitions are gathered over the dp ranks.
    2. Shards are gathered over the tensor ranks.
    3. Every pipeline rank sends its stages to the others.

    Args:
        model_parts: The pipeline stages of this rank.
        pipeline: The pipeline ranks.
        masters: True returns float32 masters if they exist; False the compute dtype.

    Returns:
        Values by full name, in the order of `module.state_dict`.
    """
    whole: dict[str, Any] = {}
    for part in model_parts:
        state: dict[str, Any] = {name: buffer.detach().clone() for name, buffer in _persistent_buffers(part.module)}
        state |= entries(part.module)
        for flat in part.zero.flats:
            master = flat.whole_master()  # 1
            for slot in flat.slots:
                own = master[slot.offset : slot.offset + slot.numel].view(slot.shape)
                own = own if masters else own.to(flat.dtype)
                state[slot.name] = _join_parts(part.tensor, slot.name, own)  # 2
        for name, parameter in part.module.named_parameters(remove_duplicate=False):
            if name not in state:  # Another name of a shared parameter.
                state[name] = next(state[other] for other, p in part.module.named_parameters() if p is parameter)
        # First in torch's order, then entries that torch does not list.
        whole |= {name: state[name] for name in _names_in_order(part.module) if name in state} | state
    return _exchange(whole, pipeline)  # 3


def _names_in_order(module: nn.Module) -> Iterator[str]:
    for prefix, inner in module.named_modules(remove_duplicate=False):
        for named in (inner.named_parameters, inner.named_buffers):
            for name, _ in named(recurse=False, remove_duplicate=False):
                yield f"{prefix}.{name}" if prefix else name
        yield f"{prefix}.{EXTRA}" if prefix else EXTRA


@overload
def gather(parameters: Tensor) -> Tensor: ...
@overload
def gather(parameters: Iterable[Tensor]) -> list[Tensor]: ...
@torch.no_grad()
def gather(parameters: Any) -> Any:
    """Return the whole value of a parameter, or of several, as new tensors.

    Collective: every rank that holds a shard must call this, for the same parameters in the same order. Parameters
    without an engine are copied. Only between steps. A pending delayed update (`offload.delayed_update`) is finished
    first. Under a pipeline call `engine.finish_update()` first, on all ranks.

    Args:
        parameters: A parameter, or several.

    Returns:
        A tensor in the shape of the whole model, or a list of them.

    Raises:
        RuntimeError: Under a pipeline with a pending delayed update.
    """
    with doing("gather", -1, publish=True) as is_outer:
        asked = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if is_outer:
            zero.agree_on_gather(asked)
        found = [_gathered(parameter) for parameter in asked]
        return found[0] if isinstance(parameters, Tensor) else found


def _gathered(parameter: Tensor) -> Tensor:
    own = zero.gather_partitions(parameter)
    found = zero.name_of(parameter)
    tensor = _tensor_of.get(found[0]) if found is not None else None
    return own if found is None or tensor is None else _join_parts(tensor, found[1], own)


_tensor_of: weakref.WeakKeyDictionary[Zero, TensorParallel] = weakref.WeakKeyDictionary()
"""The tensor parallelism of the parameters that a Zero partitions."""


def remember_parts(part: ModelPart) -> None:
    """Register a model part, so that `gather` can join its tensor-parallel shards.

    Args:
        part: The model part.
    """
    _tensor_of[part.zero] = part.tensor


def _join_parts(tensor: TensorParallel, name: str, own: Tensor) -> Tensor:
    part, group = tensor.parts.get(name), tensor.group
    if part is None:
        return own.clone()
    whole = own.new_empty(part.shape)
    for index, (dim, ranges) in enumerate(group.collect([part.dim, part.ranges])):
        theirs = type(part)(shape=part.shape, dim=dim, ranges=tuple((low, high) for low, high in ranges))
        values = own.contiguous() if index == group.index else own.new_empty(theirs.own_shape)
        group.broadcast(values, index)
        put(theirs, values, whole)
    return whole


def _exchange(whole: dict[str, Any], group: Group) -> dict[str, Any]:
    if group.size == 1:
        return whole
    own: dict[str, Tensor] = {}
    written: dict[str, Any] = {}
    for name, value in whole.items():
        written[name], tensors = encode(name, value)
        own |= tensors
    every = {name: value for theirs in group.collect(written) for name, value in theirs.items()}
    tensors = _exchange_tensors(own, group)
    return {name: decode(value, tensors) for name, value in every.items()}


def _exchange_tensors(own: dict[str, Tensor], group: Group) -> dict[str, Tensor]:
    described = {name: [list(t.shape), str(t.dtype).removeprefix("torch.")] for name, t in own.items()}
    state: dict[str, Tensor] = {}
    for index, names in enumerate(group.collect(described)):
        for name, (shape, dtype) in names.items():
            tensor = (
                own[name].contiguous()
                if index == group.index
                else torch.empty(shape, dtype=getattr(torch, dtype), device=group.device)
            )
            group.broadcast(tensor, index)
            state[name] = tensor
    return state


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for prefix, child in module.named_modules():
        for key, buffer in child.named_buffers(recurse=False):
            if key not in child._non_persistent_buffers_set:
                yield (f"{prefix}.{key}" if prefix else key), buffer
