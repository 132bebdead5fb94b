"""Which slice of a whole parameter a tensor-parallel rank holds, and the way between the two. Pure functions."""

from __future__ import annotations

import torch
from torch import Tensor

from speedlab.layout import ShardRange, share_of


def cut_along(shape: torch.Size, dim: int, size: int, index: int, *, packed: int = 1, step: int = 1) -> ShardRange:
    """The part of rank `index` of `size` when a parameter of `shape` is cut along `dim`.

    Args:
        packed: matrices that lie one after the other along `dim`; each of them is cut.
        step: elements that stay together (those of a head).
    """
    width = shape[dim] // packed
    start, end = share_of(width // step, size, index)
    ranges = tuple((k * width + start * step, k * width + end * step) for k in range(packed))
    return ShardRange(shape=tuple(shape), dim=dim, ranges=ranges)


def take(part: ShardRange, whole: Tensor) -> Tensor:
    """The rank's own tensor, in memory of its own, of the `whole` one."""
    return torch.cat([whole.narrow(part.dim, start, end - start) for start, end in part.ranges], part.dim)


def put(part: ShardRange, own: Tensor, whole: Tensor) -> None:
    """Write the rank's `own` tensor to its place in the `whole` one."""
    position = 0
    for start, end in part.ranges:
        whole.narrow(part.dim, start, end - start).copy_(own.narrow(part.dim, position, end - start))
        position += end - start
