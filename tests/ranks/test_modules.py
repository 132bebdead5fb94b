"""Modules with one awkward property each, at every stage on two ranks, with blocks as units of their own and merged."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from grids import thinned
from torch import nn

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


def with_statistics() -> nn.Module:
    model = models.with_buffers()
    for block in model.blocks:
        block.scale = block.scale.bfloat16()
    return model


def norms_dtypes(case: Case) -> dict[str, torch.dtype]:
    with engine_for(case) as engine:
        engine_step(engine, case, 0)
        return {name: each.dtype for name, each in engine.module.named_parameters()}


@pytest.mark.parametrize("stage", [1, 3])
def test_batch_norm_stays_in_the_dtype_of_its_statistics(check: Check, two: Pool, stage: int) -> None:
    """torch's takes one dtype for both, whatever its input is in."""
    case = Case(build=with_statistics, batch=models.points, whole=False, stage=stage, dtype="bfloat16", steps=6)
    check(two, [case, dataclasses.replace(case, bucket_bytes=2**20)], BFLOAT16, timeout=30)
    (dtypes, _) = two.run(norms_dtypes, case, timeout=30)
    assert {dtype for name, dtype in dtypes.items() if "norm" in name} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if "norm" not in name} == {torch.bfloat16}


def failed_between_dtypes() -> list[str]:
    with engine_for(Case(build=models.with_buffers, batch=models.points, dtype="bfloat16")) as engine:
        try:
            engine(*models.points(0, 0))
        except RuntimeError as error:
            return error.__notes__
    return []


def test_buffers_that_do_not_fit_the_dtype_are_named(two: Pool) -> None:
    """They stay as they are, as tables of angles have to; a model may not like that."""
    for _, note in two.run(failed_between_dtypes, timeout=30):
        assert "running_mean" not in note
        assert "in float32 blocks.0.scale, blocks.1.scale, blocks.2.scale:" in note
        assert "buffer.to(torch.bfloat16)" in note


def norms_alongside_nothing(case: Case) -> list[float]:
    """A frozen parameter without elements, in a flat of its own."""
    model = case.build()
    model.blocks[1].register_parameter("added", nn.Parameter(torch.zeros(0, 3), requires_grad=False))
    with engine_for(case, model=model) as engine:
        return [engine_step(engine, case, step) for step in range(3)]


def norms_without(case: Case) -> list[float]:
    with engine_for(case) as engine:
        return [engine_step(engine, case, step) for step in range(3)]


def test_a_flat_without_elements(two: Pool) -> None:
    case = Case(stage=3)
    assert two.run(norms_alongside_nothing, case, timeout=30) == two.run(norms_without, case, timeout=30)


AWKWARD = ["tied weights", "frozen parameters", "block unused by some data"]


@pytest.mark.parametrize(
    ("name", "stage"),
    thinned(itertools.product(AWKWARD, STAGES), lambda name, stage: (AWKWARD.index(name) + stage) % 2 == 1),
)
def test_module_on_four_ranks(check: Check, pool_of: PoolOf, name: str, stage: int) -> None:
    case = dataclasses.replace(MODULES[name], stage=stage, steps=6)
    check(pool_of(4), [case], FLOAT32, timeout=60)
