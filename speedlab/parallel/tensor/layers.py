"""Forwards of layers that are cut over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from speedlab.comm import Group
from speedlab.layout import ShardRange
from speedlab.parallel.module_patches import ModulePatch
from speedlab.parallel.tensor.autograd_collectives import (
    copy,
    gather,
    gather_tokens,
    reduce,
    scatter_tokens,
    split,
    sum_shared,
)
from speedlab.parallel.tensor.tp_plan import PlanError, Style


def outputs_dim(name: str, module: nn.Module) -> int:
    """Return the dimension of a linear layer's weight that indexes its outputs.

    Args:
        name: Name of the layer, for the message.
        module: The layer.

    Raises:
        PlanError: The module is not a linear layer with torch's own forward.
    """
    forward = type(module).forward
    if forward is nn.Linear.forward:
        return 0
    if type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers."):
        return 1  # GPT-2 stores its weights transposed.
    raise PlanError(
        f"tp_plan: {name} is a {type(module).__name__}; only linear layers and embeddings with torch's own forward are "
        f"cut, so leave it out of the plan"
    )


class Inputs:
    """Prepares the input of the column-parallel layers of one parent, once for all layers that get the same tensor.

    Queries, keys and values of one input then need one sum of gradients instead of three.
    """

    def __init__(self, group: Group, *, sequence: bool, several: bool) -> None:
        """Start without known inputs.

        Args:
            group: The tensor-parallel ranks.
            sequence: Whether inputs are split by tokens.
            several: Whether the parent has more than one such layer.
        """
        self._group, self._several = group, several
        self._prepare = gather_tokens if sequence else copy
        self._known: list[tuple[weakref.ref[Tensor], Tensor]] = []

    def __call__(self, x: Tensor) -> Tensor:
        for known, prepared in self._known:
            if known() is x:
                return prepared
        prepared = self._prepare(x, self._group)
        if self._several:
            self._known.append((weakref.ref(x), prepared))
        return prepared

    def hook(self) -> Callable[..., None]:
        """Return `forget` as a function. A bound method would be copied together with the module, and with all that it
        refers to.
        """
        return lambda *_: self.forget()

    def forget(self) -> None:
        """Drop prepared inputs at the end of the parent's forward, to free their memory."""
        self._known.clear()


def column(
    layer: Any, style: Style, group: Group, inputs: Inputs, width: int, shared: ShardRange | None
) -> ModulePatch:
    """Return the patch of a linear layer that computes some of its outputs.

    Args:
        layer: The layer.
        style: How the plan cuts it.
        group: The tensor-parallel ranks.
        inputs: Prepares its input.
        width: Number of outputs of the full layer.
        shared: Slice of the weight, if other ranks hold the same one; else None.
    """

    def new(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def cut(x: Tensor) -> Tensor:
            x = inputs(x)
            if shared is not None:
                return _shared_linear(layer, x, group, shared)
            y = forward(x)
            return gather(y, group, -1, width) if style.whole_outside else y

        return cut

    return ModulePatch(layer, "forward", new)


def _shared_linear(layer: Any, x: Tensor, group: Group, part: ShardRange) -> Tensor:
    weight, bias = sum_shared(layer.weight, group, part), layer.bias
    if bias is not None:
        whole = (part.shape[part.dim],)
        bias = sum_shared(bias, group, ShardRange(shape=whole, dim=0, ranges=part.ranges))
    return F.linear(x, weight if part.dim == 0 else weight.t(), bias)


def row(name: str, layer: Any, style: Style, group: Group, outputs: int, *, sequence: bool) -> ModulePatch:
    """Return the patch of a linear layer that uses some of its inputs. The bias is added once, to the sum.

    Args:
        name: Name of the layer, for messages.
        layer: The layer.
        style: How the plan cuts it.
        group: The tensor-parallel ranks.
        outputs: Dimension of the weight that indexes outputs.
        sequence: Whether the output is split by tokens.
    """

    def new(_: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def cut(x: Tensor) -> Tensor:
            if style.whole_outside:
                x = split(x, group)
            weight = layer.weight if outputs == 0 else layer.weight.t()
            if x.shape[-1] != weight.shape[1]:
                raise PlanError(
                    f"{name} has the weights of {weight.shape[1]} inputs on this rank, but {x.shape[-1]} came; the "
                    f"layer before it must be cut too (colwise), or this one be rowwise_split_input"
                )
            y = F.linear(x, weight)
            y = scatter_tokens(y, group) if sequence else reduce(y, group)
            return y if layer.bias is None else y + layer.bias

        return cut

    return ModulePatch(layer, "forward", new)


def vocabulary(layer: nn.Embedding, group: Group, start: int, end: int) -> list[ModulePatch]:
    """Return the patches of an embedding with rows [start, end) of the vocabulary. Other tokens give zeros, and the
    ranks' results are summed.

    Args:
        layer: The embedding.
        group: The tensor-parallel ranks.
        start: First row of this rank.
        end: End of its rows.
    """

    def new(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def cut(tokens: Tensor) -> Tensor:
            outside = (tokens < start) | (tokens >= end)
            found = forward((tokens - start).masked_fill(outside, 0))
            return reduce(found.masked_fill(outside.unsqueeze(-1), 0), group)

        return cut

    def padding(index: int | None) -> int | None:
        return index - start if index is not None and start <= index < end else None

    return [ModulePatch(layer, "forward", new), ModulePatch(layer, "padding_idx", padding)]


def columns_of_embedding(layer: nn.Embedding, style: Style, group: Group) -> ModulePatch:
    """Return the patch of an embedding with some of its columns.

    Args:
        layer: The embedding.
        style: How the plan cuts it.
        group: The tensor-parallel ranks.
    """

    def new(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        width = layer.embedding_dim
        return lambda tokens: gather(forward(tokens), group, -1, width) if style.whole_outside else forward(tokens)

    return ModulePatch(layer, "forward", new)


def check_embedding(name: str, layer: nn.Embedding) -> None:
    """Check that an embedding can be cut.

    Args:
        name: Name of the embedding, for the message.
        layer: The embedding.

    Raises:
        PlanError: It has an option that needs the full table.
    """
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(layer, option):
            raise PlanError(f"{name}: an embedding with {option}={getattr(layer, option)!r} is not cut; turn it off")
