"""Grids of which `make test` runs some points and the nightly tier all."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def thinned(points: Iterable[tuple[Any, ...]], keep: Callable[..., bool]) -> list[Any]:
    """For `pytest.mark.parametrize`: points that `keep(*point)` refuses are left to the nightly tier.

    Of three axes and more keep what lets every two values meet (half of the grid, by the parity of the sum of places);
    of two, each value with half of the other axis.
    """
    return [pytest.param(*point, marks=() if keep(*point) else pytest.mark.nightly) for point in points]
