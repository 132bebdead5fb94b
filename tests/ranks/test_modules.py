"""Modules with one awkward property each, at every stage on two ranks, with blocks as units of their own and merged."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from grids import thinned
from torch import nn

import speedlab
from ranks import models
from ranks.conftest import Check, PoolOf
from ranks.loops import Case, engine_for, engine_step
from ranks.pool import Pool
from ranks.test_parity import BFLOAT16, FLOAT32, STAGES

# Micro-batches where the data chooses a branch or a batch is normalised: there one large batch is another computation.
MODULES: dict[str, Case] = {
    "tied weights": Case(build=models.tied),
    "frozen parameters": Case(build=models.frozen),
    "frozen last block": Case(build=models.frozen_end),
    "block unused by some data": Case(build=models.skips_by_data, whole=False),
    "block unused by some data, accumulated": Case(build=models.skips_by_data, whole=False, accumulation=2),
    "block that nobody uses": Case(build=models.never_uses_middle),
    "layer outside blocks unused by some data": Case(build=models.experts, batch=models.points, whole=False),
    "buffers and BatchNorm": Case(build=models.with_buffers, batch=models.points, whole=False),
    "called twice before backward": Case(loss=models.loss_of_two_calls, whole=False),
    "one block in several places": Case(build=models.shared_block),
    "layers of a block in a list": Case(build=models.layered),
    "blocks in lists of a list": Case(build=models.staged),
    "parts of blocks called alone": Case(build=models.entered_below),
    "parts of blocks called alone, computed again": Case(build=models.entered_below, checkpointing="block"),
    "parts of frozen blocks called alone": Case(build=models.entered_below_frozen),
    "modules that take no hooks": Case(build=models.with_scripted),
    "dataclass and nested outputs": Case(build=models.structured, loss=models.structured_loss),
    "output used in part": Case(build=models.half_used, loss=models.first_output),
    "own checkpointing": Case(build=models.user_checkpoint),
    "own reentrant checkpointing": Case(build=models.reentrant_checkpoint),
    "own checkpointing inside ours": Case(build=models.user_checkpoint, checkpointing="block"),
}


EACH, MERGED = 1, 2**20
"""Bytes of a bucket: blocks are units of their own, or one unit."""


@pytest.mark.parametrize(
    ("name", "stage", "bucket"),
    thinned(
        itertools.product(MODULES, STAGES, (EACH, MERGED)),
        lambda name, stage, bucket: (list(MODULES).index(name) + stage) % 2 == (bucket == MERGED),
    ),
)
def test_module(check: Check, two: Pool, name: str, stage: int, bucket: int) -> None:
    """Each at two stages as units of its own and at the two others merged."""
    check(two, [dataclasses.replace(MODULES[name], stage=stage, bucket_bytes=bucket, steps=6)], FLOAT32, timeout=30)


@pytest.mark.parametrize("stage", STAGES)
def test_several_dtypes(check: Check, two: Pool, stage: int) -> None:
    """float64 and bfloat16 layers beside float32 ones keep their dtype; the bfloat16 ones have float32 masters."""
    case = Case(build=models.mixed, batch=models.points, whole=False, stage=stage, steps=6)
    check(two, [case, dataclasses.replace(case, bucket_bytes=2**20)], BFLOAT16, timeout=30)


AWKWARD = ["tied weights", "frozen parameters", "block unused by some data"]


@pytest.mark.parametrize(
    ("name", "stage"),
    thinned(itertools.product(AWKWARD, STAGES), lambda name, stage: (AWKWARD.index(name) + stage) % 2 == 1),
)
def test_module_on_four_ranks(check: Check, pool_of: PoolOf, name: str, stage: int) -> None:
    case = dataclasses.replace(MODULES[name], stage=stage, steps=6)
    check(pool_of(4), [case], FLOAT32, timeout=60)


def a_failed_look(engine: Any) -> None:
    """The module fails in a forward of its own, with a gather ahead."""
    hook = engine.module.blocks[0].up.register_forward_pre_hook(fail)
    with torch.no_grad(), pytest.raises(ArithmeticError):
        engine.module(*Case().batch(0, 0))
    hook.remove()


def fail(module: nn.Module, inputs: object) -> None:
    raise ArithmeticError


def a_part_alone(engine: Any) -> None:
    with torch.no_grad():
        engine.module.embedding(Case().batch(0, 0)[0])


def losses_behind(case: Case, leave_open: Callable[[Any], None], end: Callable[[Any], None]) -> list[float]:
    """The losses of an engine that comes after one whose pass was left open."""
    earlier = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    for step in range(2):  # From then on units are gathered ahead.
        engine_step(earlier, case, step)
    leave_open(earlier)
    end(earlier)
    del earlier
    return losses_of(case)


def losses_of(case: Case) -> list[float]:
    with engine_for(case) as engine:
        return [engine_step(engine, case, step) for step in range(2)]


def drop(engine: Any) -> None: ...


def destroy(engine: Any) -> None:
    engine.destroy()


def forget(engine: Any) -> None:
    engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("end", [forget, destroy, drop])
@pytest.mark.parametrize("leave_open", [a_failed_look, a_part_alone])
def test_an_engine_behind_an_open_pass(two: Pool, leave_open: Any, end: Any) -> None:
    """Where a peer's parameters were on their way, its next engine would wait for them to be read."""
    case = Case(stage=3, bucket_bytes=EACH)
    assert two.run(losses_behind, case, leave_open, end, timeout=30) == two.run(losses_of, case, timeout=30)


def losses_beside(case: Case, leave_open: Callable[[Any], None]) -> tuple[list[float], list[float]]:
    """The losses of an engine, and of another one that trains while a pass of the first is open."""
    with engine_for(case) as one, engine_for(case) as other:
        losses = [engine_step(one, case, step) for step in range(2)]
        leave_open(one)
        beside = [engine_step(other, case, step) for step in range(2)]
        return [*losses, engine_step(one, case, 2)], [*beside, engine_step(other, case, 2)]


@pytest.mark.parametrize("leave_open", [a_failed_look, a_part_alone])
def test_an_engine_beside_an_open_pass(two: Pool, leave_open: Any) -> None:
    for here in two.run(losses_beside, Case(stage=3, bucket_bytes=EACH), leave_open, timeout=30):
        assert here[0] == here[1]
