"""Collectives of tensor parallelism on activations, in pairs that are each other's backward.

| function          | forward                                  | backward                                |
|-------------------|------------------------------------------|-----------------------------------------|
| `copy`            | nothing                                  | sum over the ranks                      |
| `reduce`          | sum over the ranks                       | nothing                                 |
| `split`           | this rank's slice of a dimension         | all-gather                              |
| `gather`          | all-gather along a dimension             | this rank's slice                       |
| `gather_tokens`   | all-gather along the tokens              | reduce-scatter                          |
| `scatter_tokens`  | reduce-scatter along the tokens          | all-gather                              |
| `sum_shared`      | nothing                                  | sum over the ranks with the same shard  |

`copy` and `reduce` are f and g of Megatron-LM (arXiv:1909.08053, section 3). The pair for tokens is that of sequence
parallelism (arXiv:2205.05198, section 4). Use `split` and `gather` if all ranks continue with the same values. Tokens
are dimension 1 of (B, T, C).
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
    """Return `x` as the input of a layer that is cut over ranks.

    Args:
        x: Any shape, the same values on all ranks.
        group: The tensor-parallel ranks.
    """
    return _Copy.apply(x, group)


@uncompiled
def reduce(x: Tensor, group: Group) -> Tensor:
    """Return the sum of `x` over the ranks. Collective.

    Args:
        x: Any shape, the same on all ranks.
        group: The tensor-parallel ranks.
    """
    return _Reduce.apply(x, group)


@uncompiled
def split(x: Tensor, group: Group, dim: int = -1) -> Tensor:
    """Return this rank's slice of `x` along `dim`.

    Args:
        x: The same values on all ranks.
        group: The tensor-parallel ranks.
        dim: Dimension to split.
    """
    return _Split.apply(x, group, dim)


@uncompiled
def gather(x: Tensor, group: Group, dim: int = -1, total: int | None = None) -> Tensor:
    """Return the ranks' `x`, concatenated along `dim`. Collective.

    Args:
        x: This rank's slice.
        group: The tensor-parallel ranks.
        dim: Dimension to concatenate.
        total: Length of the result along `dim`; needed if the ranks' slices differ in length.
    """
    return _Gather.apply(x, group, dim, x.shape[dim] * group.size if total is None else total)


@uncompiled
def gather_tokens(x: Tensor, group: Group) -> Tensor:
    """Return all tokens (B, T, C), as the input of a layer that is cut over ranks. Collective.

    Args:
        x: (B, T / tp, C), this rank's tokens.
        group: The tensor-parallel ranks.
    """
    return _GatherTokens.apply(x, group)


@uncompiled
def scatter_tokens(x: Tensor, group: Group) -> Tensor:
    """Return this rank's tokens (B, T / tp, C) of the sum over the ranks. Collective.

    Args:
        x: (B, T, C), this rank's term of the sum.
        group: The tensor-parallel ranks.
    """
    return _ScatterTokens.apply(x, group)


@uncompiled
def sum_shared(weight: Tensor, group: Group, part: ShardRange) -> Tensor:
    """Return a parameter whose gradients are summed over the ranks that hold the same shard.

    Args:
        weight: This rank's shard.
        group: The tensor-parallel ranks.
        part: The slice of the full parameter that the shard is.
    """
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
        # Sums the full gradient over all ranks: one group per set of sharing ranks would cost more than this saves.
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
    padded = group.gather_along(F.pad(x, padding), dim)  # An all-gather needs equal sizes on all ranks.
    ranges = [share_of(total, group.size, k) for k in range(group.size)]
    own = tuple((k * widest, k * widest + end - start) for k, (start, end) in enumerate(ranges))
    return take(ShardRange(shape=tuple(padded.shape), dim=dim, ranges=own), padded)
