"""Parity: the engine on ranks gives the losses, gradient norms and parameters of a plain loop in one process.

Ranks see different data, several steps, SGD with momentum besides AdamW, because Adam hides an error of scale.

Why these tolerances. Sums are taken in another order, 2^-24 each: measured 1e-7 of a loss, 1e-5 of an update. In
bfloat16 the plain loop makes the same roundings and starts from values that bfloat16 holds, and the same was measured;
but where the order of a float32 sum decides a rounding (2^-9) a single element goes another way. A wrong factor in one
place makes 50 % of an update.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from grids import thinned

from ranks import models
from ranks.conftest import GLOO, Check, on_both_backends
from ranks.loops import Case, Tolerance, adamw, problems, sgd, train_cases, train_plain
from ranks.pool import Pool

FLOAT32 = Tolerance(loss=2e-6, norm=2e-6, update=2e-4)
BFLOAT16 = Tolerance(loss=2e-4, norm=1e-3, update=0.01)

STAGES = [0, 1, 2, 3]


def grid(stage: int, dtype: str) -> list[Case]:
    """accumulation × checkpointing × optimizer; clipping alternates so that it meets each value of each of them."""
    choices = itertools.product((1, 2), ("none", "block"), (sgd, adamw))
    return [
        Case(
            stage=stage,
            dtype=dtype,
            build=models.transformer if dtype == "float32" else models.rounded_transformer,
            whole=dtype == "float32",
            accumulation=accumulation,
            checkpointing=checkpointing,
            optimizer=optimizer,
            # Norms are 0.6 to 0.9: this clips in every step.
            clip_norm=0.3 if (accumulation == 1) ^ (checkpointing == "none") ^ (optimizer is sgd) else None,
        )
        for accumulation, checkpointing, optimizer in choices
    ]


@pytest.mark.parametrize(
    ("stage", "dtype", "ranks"),
    [
        pytest.param(stage, dtype, (size, backend), id=f"{stage}-{dtype}-dp{size}-{backend}")
        for stage in STAGES
        for number, dtype in enumerate(["float32", "bfloat16"])
        for size, backend in ([(2, "shared"), (4, "shared")] if (stage + number) % 2 == 0 else [(1, "shared"), *GLOO])
        if (size, backend) != (4, "gloo") or stage == 3
    ],
    indirect=["ranks"],
)
def test_plain_loop(check: Check, ranks: Pool, stage: int, dtype: str) -> None:
    """On 4 ranks the half of the grid that clips, on 2 ranks the other half; on gloo the other way round; on one rank,
    which is quick, all. In a half every two values meet: so at each stage and precision all of the grid is run, in turn
    through shared memory and on gloo."""
    half = (ranks.size == 2) == (ranks.backend == "gloo")
    cases = [case for case in grid(stage, dtype) if ranks.size == 1 or (case.clip_norm is not None) == half]
    check(ranks, cases, FLOAT32 if dtype == "float32" else BFLOAT16)


@pytest.mark.nightly
@on_both_backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", STAGES)
def test_plain_loop_on_the_whole_grid(check: Check, ranks: Pool, stage: int, dtype: str) -> None:
    cases = [replace(case, steps=10) for case in grid(stage, dtype)]
    check(ranks, cases, FLOAT32 if dtype == "float32" else BFLOAT16)


@pytest.mark.parametrize("stage", STAGES)
def test_merged_units(check: Check, two: Pool, stage: int) -> None:
    """Blocks that share a unit, all of them and two of three."""
    check(two, [Case(stage=stage, bucket_bytes=size, accumulation=2) for size in (2**20, 12_000)], FLOAT32)


@pytest.mark.parametrize(
    ("ranks", "dtype"),
    thinned(
        itertools.product([2, 4, *GLOO], ["float32", "bfloat16"]),
        lambda ranks, dtype: (ranks in (2, GLOO[1])) == (dtype == "float32"),
    ),
    indirect=["ranks"],
)
def test_stages_give_the_same_bits(ranks: Pool, dtype: str) -> None:
    """Sums are taken in rank order at every stage, so not even rounding tells the stages apart."""
    cases = [Case(stage=stage, dtype=dtype, optimizer=adamw, clip_norm=0.3) for stage in STAGES]
    by_rank = ranks.run(train_cases, cases)
    for rank, paths in enumerate(by_rank):
        for case, path in zip(cases, paths, strict=True):
            assert path.losses == paths[0].losses, f"rank {rank}, {case}"
            assert path.norms == paths[0].norms, f"rank {rank}, {case}"
            different = [n for n, p in path.parameters.items() if not p.equal(paths[0].parameters[n])]
            assert not different, f"rank {rank}, {case}"


def test_oracle_notices_a_wrong_scale(two: Pool) -> None:
    """The judge itself: a gradient that is 1 % too large must be found, with SGD and with clipping under AdamW."""
    for case in (Case(), Case(optimizer=adamw)):
        right = two.run(train_plain, case, 2)[0]
        scaled = two.run(train_plain, replace(case, loss=louder), 2)[0]
        scaled.losses = right.losses
        found = problems([scaled], right, FLOAT32)
        assert any("gradient norm" in line for line in found)
        assert any("of its way apart" in line for line in found) == (case.optimizer is sgd)


def louder(model, batch):
    return 1.01 * model(*batch)
