"""Slices of parameters for tensor parallelism: which one a rank holds, and copies in both directions. Pure
functions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from speedlab.layout import ShardRange, share_of


def cut_along(shape: torch.Size, dim: int, size: int, index: int, *, packed: int = 1, step: int = 1) -> ShardRange:
    """Return the slice of one rank.

    Args:
        shape: Shape of the full parameter.
        dim: Dimension to cut.
        size: Number of ranks.
        index: Index of the rank.
        packed: Number of matrices that are concatenated along `dim`; each of them is cut.
        step: Elements that stay together (those of one head).
    """
    width = shape[dim] // packed
    start, end = share_of(width // step, size, index)
    ranges = tuple((k * width + start * step, k * width + end * step) for k in range(packed))
    return ShardRange(shape=tuple(shape), dim=dim, ranges=ranges)


def take(part: ShardRange, whole: Tensor) -> Tensor:
    """Return a copy of the rank's slice of the full tensor.

    Args:
        part: The slice.
        whole: The full tensor.
    """
    return torch.cat([whole.narrow(part.dim, start, end - start) for start, end in part.ranges], part.dim)


def put(part: ShardRange, own: Tensor, whole: Tensor) -> None:
    """Copy the rank's tensor to its slice of the full tensor.

    Args:
        part: The slice.
        own: The rank's tensor.
        whole: The full tensor; changed in place.
    """
    position = 0
    for start, end in part.ranges:
        whole.narrow(part.dim, start, end - start).copy_(own.narrow(part.dim, position, end - start))
        position += end - start
