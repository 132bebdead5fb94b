"""The pools of rank processes: one for each world size and backend, started when first asked for, ended with the
session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from ranks.pool import Pool

if TYPE_CHECKING:
    from ranks.loops import Case, Tolerance, Trajectory

PoolOf = Callable[..., Pool]
Check = Callable[..., None]
"""`check(pool, cases, allowed, timeout=…)`: see the fixture."""


class Pools:
    """One for each world size and backend."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str, str], Pool] = {}

    def of(self, size: int, backend: str = "shared", hosts: str = "") -> Pool:
        key = size, backend, hosts
        if key not in self._made:
            self._made[key] = Pool(*key)
        return self._made[key]

    def rest(self) -> None:
        for pool in self._made.values():
            pool.rest()

    def close(self) -> None:
        for pool in self._made.values():
            pool.close()


@pytest.fixture(scope="session")
def pools() -> Iterator[Pools]:
    made = Pools()
    yield made
    made.close()


@pytest.fixture(scope="session")
def pool_of(pools: Pools) -> PoolOf:
    """`pool_of(size, backend="shared", hosts="")`: the pool of so many ranks."""
    return pools.of


@pytest.fixture(scope="module")
def compiling_pool_of() -> Iterator[PoolOf]:
    """As `pool_of`, for a module whose ranks load torch's compiler: it stays in a process, with its memory."""
    made = Pools()
    yield made.of
    made.close()


@pytest.fixture(autouse=True, scope="module")
def no_group_outlives_its_module(pools: Pools) -> Iterator[None]:
    """The groups of pools."""
    yield
    pools.rest()


GLOO = [(2, "gloo"), (4, "gloo")]
"""For `on_both_backends`, and for tests that run on gloo alone."""


@pytest.fixture(params=[1, 2, 4], ids=lambda size: f"dp{size}")
def ranks(request: pytest.FixtureRequest, pool_of: PoolOf) -> Pool:
    """Pools of 1, 2 and 4 ranks in turn; `@pytest.mark.parametrize("ranks", [2], indirect=True)` chooses others, and
    (2, "gloo") another backend than shared memory."""
    return pool_of(*request.param) if isinstance(request.param, tuple) else pool_of(request.param)


on_both_backends = pytest.mark.parametrize(
    "ranks", [1, 2, 4, *GLOO], indirect=True, ids=["dp1", "dp2", "dp4", "dp2-gloo", "dp4-gloo"]
)


@pytest.fixture
def two(pool_of: PoolOf) -> Pool:
    """The pool of two ranks."""
    return pool_of(2)


@pytest.fixture(scope="session")
def plain(pool_of: PoolOf) -> Callable[[Case, int], Trajectory]:
    """The plain loop's result for a case and so many ranks' data, computed once, in a process set up as the ranks are.

    (With other thread counts matrix kernels of low precision round elsewhere.)
    """
    from ranks.loops import train_plain

    known: dict[tuple[Case, int], Trajectory] = {}

    def of(case: Case, dp: int) -> Trajectory:
        # What only the engine knows makes no difference here.
        key = replace(case, stage=0, checkpointing="none", bucket_bytes=1), dp
        if key not in known:
            known[key] = pool_of(1).run(train_plain, *key)[0]
        return known[key]

    return of


@pytest.fixture
def check(plain: Callable[[Case, int], Trajectory]) -> Check:
    """Train all cases in one call and compare; fails with a line for each thing that is wrong in each case."""
    from ranks.loops import problems, train_cases

    def run(ranks: Pool, cases: list[Case], allowed: Tolerance, timeout: float = 90.0) -> None:
        by_rank = ranks.run(train_cases, cases, timeout=timeout)
        wrong = [
            f"[{case}] {problem}"
            for case, *paths in zip(cases, *by_rank, strict=True)
            for problem in problems(paths, plain(case, ranks.size), allowed)
        ]
        assert not wrong, f"{len(wrong)} differences at dp {ranks.size}:\n" + "\n".join(wrong)

    return run
