"""Ranks that compute one batch together and were given different tokens are told, before an update is made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ranks.conftest import PoolOf
from ranks.layout_cases import LayoutCase, gpt_loss
from ranks.loops import engine_for
from speedlab.layout import Layout

Choice = Callable[[Any], int]
"""Which micro-batch a rank takes, given its engine."""


def by_data_index(engine: Any) -> int:
    return engine.mesh.data_index


def by_rank(engine: Any) -> int:
    return engine.world.rank


def by_odd_rank(engine: Any) -> int:
    return engine.world.rank % 2


def step_of(engine: Any, case: LayoutCase, choice: Choice, step: int) -> str | float:
    """A step on what `choice` takes: its loss, or what was said instead."""
    micros = [case.batch(step, 10 * micro + choice(engine)) for micro in range(case.accumulation)]
    try:
        if case.layout.pp > 1:
            return engine.train_batch(micros)
        for batch in micros:
            engine.backward(gpt_loss(engine, batch))
            engine.step()
        return engine.totals.loss
    except ValueError as error:
        return str(error)


def go_wrong_and_right(case: LayoutCase, choice: Choice) -> dict[str, Any]:
    """Different tokens at first, then the same, then different ones again, then the same, and an evaluation of each."""
    with engine_for(case) as engine:
        first = step_of(engine, case, choice, 0)
        right = [step_of(engine, case, by_data_index, step) for step in range(2)]
        before, made = engine.state_dict(), engine.global_step
        later = step_of(engine, case, choice, 2)
        same = all(torch.equal(tensor, before[name]) for name, tensor in engine.state_dict().items())
        right.append(step_of(engine, case, by_data_index, 2))
        engine.evaluate([case.batch(5, by_data_index(engine))])
        try:
            evaluated = engine.evaluate([case.batch(5, choice(engine))])
        except ValueError as error:
            evaluated = str(error)
        after = step_of(engine, case, by_data_index, 3)
    return {"first": first, "later": later, "evaluated": evaluated, "right": [*right, after], "kept": (same, made)}


def only_right(case: LayoutCase) -> list[Any]:
    with engine_for(case) as engine:
        return [step_of(engine, case, by_data_index, step) for step in range(4)]


@pytest.mark.parametrize(
    ("layout", "choice", "who"),
    [
        (Layout(tp=2), by_rank, "rank 1 not what rank 0 was given"),
        (Layout(pp=2), by_rank, "rank 1 not what rank 0 was given"),
        (
            Layout(tp=2, dp=2),
            by_odd_rank,
            "rank 1 not what rank 0 was given; rank 3 not what rank 2 was given",
        ),
        (Layout(tp=2, pp=2), by_odd_rank, "rank 1, 3 not what rank 0 was given"),
    ],
    ids=["tp2", "pp2", "dp2-tp2", "pp2-tp2"],
)
def test_different_tokens_are_told_on_all_ranks(pool_of: PoolOf, layout: Layout, choice: Choice, who: str) -> None:
    case = LayoutCase(layout=layout, stage=1, accumulation=2)
    pool = pool_of(layout.world_size)
    expected = pool.run(only_right, case, timeout=120)
    for reported, right in zip(pool.run(go_wrong_and_right, case, choice, timeout=120), expected, strict=True):
        for when in ("first", "later", "evaluated"):
            assert f"under {layout} ranks that differ only along tp and pp compute one batch" in reported[when], when
            assert f"were given different tokens: {who}. Choose data by engine.mesh.data_index" in reported[when], when
        assert reported["kept"] == (True, 2)
        assert reported["right"] == right, "what was refused has left nothing behind"


def other_lengths(case: LayoutCase) -> str | float:
    """Rank 1 has one token less, as batches have that are padded each for itself."""

    def shorter(step: int, index: int) -> tuple[Tensor, ...]:
        return tuple(part[:, : part.shape[1] - index] for part in case.batch(step, 0))

    with engine_for(case) as engine:
        try:
            return gpt_loss(engine, shorter(0, engine.world.rank)).item()
        except ValueError as error:
            return str(error)


def test_other_lengths_are_told_before_ranks_wait_for_each_other(pool_of: PoolOf) -> None:
    for reported in pool_of(2).run(other_lengths, LayoutCase(layout=Layout(tp=2)), timeout=60):
        assert "were given different tokens: rank 1 not what rank 0 was given" in reported
