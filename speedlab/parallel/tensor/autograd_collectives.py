"""What tensor parallelism does to activations, in pairs that are each other's backward.

| function          | forward                                  | backward                                |
|-------------------|------------------------------------------|-----------------------------------------|
| `copy`            | nothing                                  | sum over the ranks                      |
| `reduce`          | sum over the ranks                       | nothing                                 |
| `split`           | this rank's slice of a dimension         | all-gather                              |
| `gather`          | all-gather along a dimension             | this rank's slice                       |
| `gather_tokens`   | all-gather along the tokens              | reduce-scatter                          |
| `scatter_tokens`  | reduce-scatter along the tokens          | all-gather                              |
| `sum_shared`      | nothing                                  | sum over the ranks that hold the same   |

The first two are f and g of Megatron-LM (arXiv:1909.08053, section 3), the pair of tokens those of sequence parallelism
(arXiv:2205.05198, section 4). `split` and `gather` stand where all ranks go on with the same values.
Tokens are dimension 1 of (B, T, C).
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from cuda_ops.torch_compat import uncompiled
from speedlab.comm import Group
from speedlab.layout import ShardRange, share_of
from speedlab.models.selective_checkpointing import computed_once
from speedlab.parallel.tensor.slicing import put, take

TOKENS = 1


@uncompiled
def copy(x: Tensor, group: Group) -> Tensor:
    """`x`, the same on all ranks, on its way to a layer of which each rank has a part."""
    return _Copy.apply(x, group)


@uncompiled
def reduce(x: Tensor, group: Group) -> Tensor:
    """The sum of the ranks' `x`."""
    return _Reduce.apply(x, group)


@uncompiled
def split(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """This rank's share of dimension `dim` of `x`, which is the same on all ranks."""
    return _Split.apply(x, group, dim)


@uncompiled
def gather(x: Tensor, group: Group, dim: int = -1, total: int | None = None) -> Tensor:
    """The ranks' `x` side by side along `dim`. `total`: the length of the whole, where shares are not of equal
    length."""
    return _Gather.apply(x, group, dim, x.shape[dim] * group.size if total is None else total)


@uncompiled
def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """All tokens of `x` (B, T / tp, C), on their way to a layer of which each rank has a part."""
    return _GatherTokens.apply(x, group)


@uncompiled
def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """This rank's tokens (B, T / tp, C) of the sum of the ranks' `x` (B, T, C)."""
    return _ScatterTokens.apply(x, group)


@uncompiled
def sum_shared(weight: Tensor, group: Group, part: ShardRange) -> Tensor:
    """A parameter of which several ranks hold the same `part`, each with a gradient from what it used it for."""
    return _SumShared.apply(weight, group, part)


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.sum(gradient), None


class _Reduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return computed_once(lambda: (group.sum(x),))[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.total = group, dim, x.shape[dim]
        return _own(x, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _whole(gradient, ctx.group, ctx.dim, ctx.total), None, None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, dim: int, total: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return computed_once(lambda: (_whole(x, group, dim, total),))[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _own(gradient, ctx.group, ctx.dim), None, None, None


class _GatherTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return computed_once(lambda: (group.gather_along(x, TOKENS),))[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.scatter_sum(gradient, TOKENS), None


class _ScatterTokens(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return computed_once(lambda: (group.scatter_sum(x, TOKENS),))[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.group.gather_along(gradient, TOKENS), None


class _SumShared(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: Group, part: ShardRange) -> Tensor:
        ctx.group, ctx.part = group, part
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Through the whole: a group for each set of sharing ranks would cost more than it saves.
        whole = gradient.new_zeros(ctx.part.shape)
        put(ctx.part, gradient, whole)
        return take(ctx.part, ctx.group.sum(whole)), None, None


def _own(x: Tensor, group: Group, dim: int) -> Tensor:
    start, end = share_of(x.shape[dim], group.size, group.index)
    return x.narrow(dim, start, end - start).contiguous()


def _whole(x: Tensor, group: Group, dim: int, total: int) -> Tensor:
    if total % group.size == 0:
        return group.gather_along(x, dim)
    dim %= x.dim()
    widest = -(-total // group.size)
    padding = [0, 0] * (x.dim() - 1 - dim) + [0, widest - x.shape[dim]]
    padded = group.gather_along(F.pad(x, padding), dim)  # Ranks send equally much.
    ranges = [share_of(total, group.size, k) for k in range(group.size)]
    own = tuple((k * widest, k * widest + end - start) for k, (start, end) in enumerate(ranges))
    return take(ShardRange(shape=tuple(padded.shape), dim=dim, ranges=own), padded)
