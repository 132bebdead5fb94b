"""Tensor parallelism beside the whole model in one process: losses, every gradient, and the random state.

Tolerances: sums over parts are taken in another order, a few times 2^-24 of the greatest gradient of each parameter.
"""

from __future__ import annotations

from typing import Any

import pytest

from ranks import tensor_models as run
from ranks.conftest import PoolOf
from ranks.pool import Pool

GPT2_LIKE = {"position": "learned", "norm": "layer", "tied": True, "bias": True}
GPTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gpt2": GPT2_LIKE,
    "untied": {"tied": False, "bias": True},
    "full loss": {"loss": "full", "norm": "layer"},
    "dropout": {**GPT2_LIKE, "dropout": 0.2},
    "rotary with dropout": {"tied": False, "dropout": 0.2},
}

sizes = pytest.mark.parametrize("size", [2, 3, 4])


def check(pool: Pool, *args: Any, **options: Any) -> None:
    by_rank = pool.run(run.compare, *args, **options)
    wrong = [f"rank {rank}: {line}" for rank, (_, lines) in enumerate(by_rank) for line in lines]
    assert not wrong, "\n".join(wrong)
    assert all(losses == by_rank[0][0] for losses, _ in by_rank), "ranks have different losses"


@sizes
@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("kind", GPTS)
def test_gpt(pool_of: PoolOf, size: int, kind: str, sequence: bool) -> None:
    check(pool_of(size), run.gpt, fields=GPTS[kind], sequence=sequence, steps=2)
