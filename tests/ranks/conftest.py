"""The pools of rank processes: one for each world size, started when first asked for, ended with the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from ranks.pool import Pool


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[int], Pool]]:
    """The pool of so many ranks."""
    pools: dict[int, Pool] = {}

    def of(size: int) -> Pool:
        if size not in pools:
            pools[size] = Pool(size)
        return pools[size]

    yield of
    for pool in pools.values():
        pool.close()


@pytest.fixture(params=[1, 2, 4], ids=lambda size: f"dp{size}")
def ranks(request: pytest.FixtureRequest, pool_of: Callable[[int], Pool]) -> Pool:
    """Pools of 1, 2 and 4 ranks in turn; `@pytest.mark.parametrize("ranks", [2], indirect=True)` chooses others."""
    return pool_of(request.param)


@pytest.fixture
def two(pool_of: Callable[[int], Pool]) -> Pool:
    """The pool of two ranks."""
    return pool_of(2)
