"""Tensors that leave a block by other paths than its output: their gradients are those of plain torch at every stage."""

from __future__ import annotations

import pytest

from ranks.conftest import PoolOf
from ranks.random_graphs import differences


@pytest.mark.parametrize(("size", "backend"), [(2, "shared"), (2, "gloo")])
def test_random_graphs(pool_of: PoolOf, size: int, backend: str) -> None:
    wrong = pool_of(size, backend).run(differences, list(range(30)), [0, 3], timeout=120)
    assert not wrong[0], "\n".join(wrong[0])


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("size", "backend"), [(1, "shared"), (2, "shared"), (2, "gloo")])
def test_many_random_graphs(pool_of: PoolOf, size: int, backend: str) -> None:
    for first in range(1000, 1300, 50):
        wrong = pool_of(size, backend).run(differences, list(range(first, first + 50)), [0, 1, 2, 3], timeout=600)
        assert not wrong[0], "\n".join(wrong[0])
