"""Changing the stage between two steps: the loss curve afterwards is the one of the unchanged run."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from grids import thinned

import speedlab
from ranks import models
from ranks.loops import Case, Trajectory, adamw, engine_for, engine_step, finish, problems, sgd, train_engine
from ranks.pool import Pool
from ranks.test_parity import FLOAT32

PAIRS = list(itertools.permutations(range(4), 2))


def train_reshaping(case: Case, stages: list[int]) -> tuple[Trajectory, list[dict[str, int]]]:
    """Train; before step i > 0 change to `stages[i]`. Also the model states of the ledger at the end of each step."""
    path, ledgers = Trajectory(), []
    with engine_for(case) as engine:
        assert engine.zero_stage == stages[0] == case.stage
        for step, stage in enumerate(stages):
            if stage != engine.zero_stage:
                engine.reshape(zero=stage)
            assert engine.zero_stage == stage
            path.losses.append(engine_step(engine, case, step))
            path.norms.append(engine.global_grad_norm)
            ledgers.append(states(engine))
        finish(path, engine)
    return path, ledgers


def states(engine: Any) -> dict[str, int]:
    ledger = engine.ledger()
    return {name: getattr(ledger, name) for name in ("parameters", "gradients", "master_weights", "optimizer_moments")}


def train_unchanged(case: Case, stages: list[int]) -> dict[int, dict[str, int]]:
    """The ledger of a run that has been at one stage from the start, for each stage."""
    found = {}
    for stage in stages:
        fixed = Case(**{**case.__dict__, "stage": stage, "steps": 1})
        with engine_for(fixed) as engine:
            engine_step(engine, fixed, 0)
            found[stage] = states(engine)
    return found


@pytest.mark.parametrize(
    ("before", "after", "dtype"),
    thinned(
        ((*pair, dtype) for pair in PAIRS for dtype in ("float32", "bfloat16")),
        lambda before, after, dtype: (before + after) % 2 == (dtype == "bfloat16"),
    ),
)
def test_every_pair_keeps_every_bit(two: Pool, before: int, after: int, dtype: str) -> None:
    """Without accumulation all stages take the same sums in the same order, so nothing may change at all."""
    case = Case(stage=before, dtype=dtype, optimizer=adamw, clip_norm=0.3, steps=6)
    fixed = two.run(train_engine, case)
    changed = two.run(train_reshaping, case, [before] * 3 + [after] * 3)
    for still, (moved, _) in zip(fixed, changed, strict=True):
        assert moved.losses == still.losses
        assert moved.norms == still.norms
        assert [n for n, p in moved.parameters.items() if not p.equal(still.parameters[n])] == []
        assert [n for n, p in moved.live.items() if not p.equal(still.live[n])] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ledger_after_a_change_is_that_of_the_new_stage(two: Pool, dtype: str) -> None:
    case = Case(stage=0, dtype=dtype, optimizer=adamw)
    order = [0, 1, 2, 3, 2, 1, 0, 3, 1]
    for (_, ledgers), expected in zip(
        two.run(train_reshaping, case, order), two.run(train_unchanged, case, [0, 1, 2, 3]), strict=True
    ):
        for step, stage in enumerate(order):
            assert ledgers[step] == expected[stage], f"step {step}, stage {stage}"
        totals = [sum(expected[stage].values()) for stage in range(4)]
        assert totals == sorted(totals, reverse=True)
        assert len(set(totals)) == 4


@pytest.mark.parametrize("ranks", [1, 4], indirect=True)
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_there_and_back_through_all_stages(ranks: Pool, plain, optimizer) -> None:
    """With accumulation, checkpointing, tied weights and frozen parameters."""
    for build in (models.tied, models.frozen):
        case = Case(build=build, optimizer=optimizer, accumulation=2, checkpointing="block", clip_norm=0.3, steps=8)
        paths = [path for path, _ in ranks.run(train_reshaping, case, [0, 1, 2, 3, 2, 0, 3, 1])]
        assert problems(paths, plain(case, ranks.size), FLOAT32) == []


def reshape_at_wrong_times(case: Case) -> list[str]:
    """A change in the middle of an accumulation, and to a stage that does not exist; the step then goes on."""
    messages = []
    with engine_for(case) as engine:
        for micro in range(2):
            engine.backward(engine(*case.batch(0, micro * engine.world.size + engine.world.rank)))
            if micro == 0:
                engine.step()
                for stage in (3, 4):
                    try:
                        engine.reshape(zero=stage)
                    except (RuntimeError, ValueError) as error:
                        messages.append(str(error))
        assert engine.step()
    return messages


def test_wrong_moment_is_refused_and_changes_nothing(two: Pool) -> None:
    for messages in two.run(reshape_at_wrong_times, Case(stage=2, accumulation=2)):
        assert len(messages) == 2
        assert "between two steps" in messages[0]


def reshape_before_first_step(case: Case) -> Trajectory:
    """The optimizer has no state yet."""
    path = Trajectory()
    with engine_for(case) as engine:
        engine.reshape(zero=3)
        engine.reshape(zero=1)
        for step in range(case.steps):
            path.losses.append(engine_step(engine, case, step))
            path.norms.append(engine.global_grad_norm)
        finish(path, engine)
    return path


def test_change_before_the_first_step(two: Pool, plain) -> None:
    case = Case(stage=0, steps=4, optimizer=adamw)
    assert problems(two.run(reshape_before_first_step, case), plain(case, 2), FLOAT32) == []


def schedule_over_a_change(case: Case, stages: list[int]) -> list[float]:
    """Rates seen by a scheduler of the user's own while the stage changes."""
    engine, optimizer, *_ = speedlab.initialize(
        model=case.build(),
        optimizer=case.optimizer,
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.5),
        config=case.config(),
    )
    rates = []
    for step, stage in enumerate(stages):
        if stage != engine.zero_stage:
            engine.reshape(zero=stage)
        rates.append(optimizer.param_groups[0]["lr"])
        engine_step(engine, case, step)
    engine.destroy()
    return rates


def test_schedule_goes_on(two: Pool) -> None:
    assert (
        two.run(schedule_over_a_change, Case(stage=0), [0, 3, 3, 1])
        == [pytest.approx([0.05, 0.025, 0.0125, 0.00625])] * 2
    )
