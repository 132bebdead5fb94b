"""Tolerances that follow from the arithmetic: so many roundings to a dtype, of values so large."""

from __future__ import annotations

import torch
from torch import Tensor


def unit(dtype: torch.dtype) -> float:
    """What rounding to the nearest changes at most, of a value: 2^-24 for float32, 2^-9 for bfloat16."""
    return torch.finfo(dtype).eps / 2


def assert_rounded(actual: Tensor, expected: Tensor, *, roundings: float, scale: float = 0.0) -> None:
    """Assert that the two, of one shape and dtype, differ by no more than `roundings` roundings.

    Args:
        roundings: by how many steps the two ways of computing may differ, each rounded to the dtype of `actual`.
        scale: magnitude of what was added up, where it is greater than the result; below it the error is absolute.

    NaN equals NaN. A rounding of a denormal result costs at most half its spacing, which is the dtype's.
    """
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    information = torch.finfo(actual.dtype)
    spacing = information.tiny * information.eps
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=roundings * unit(actual.dtype),
        atol=roundings * max(scale * unit(actual.dtype), spacing),
        equal_nan=True,
    )
