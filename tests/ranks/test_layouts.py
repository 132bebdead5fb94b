"""Parity under every layout: tensor × pipeline × data, every ZeRO stage and schedule, against one plain process.

Tolerances as in test_parity: sums in another order, and nothing else. Gradients are clipped, so that a norm which
counts a parameter twice, or misses one, is found as a wrong training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from grids import thinned

from ranks.conftest import PoolOf
from ranks.layout_cases import (
    LayoutCase,
    bert,
    even_tokens,
    gpt2,
    labels_loss,
    llama,
    long_tokens,
    masked_gpt,
    rounded_gpt,
    sparse_gpt,
    t5,
    tiled_gpt,
    train_layouts,
    untied_gpt2,
    whole_gpt,
)
from ranks.loops import Case, Tolerance, Trajectory, adamw, problems
from speedlab.layout import Layout

FLOAT32 = Tolerance(loss=2e-6, norm=1e-5, update=5e-4)
BFLOAT16 = Tolerance(loss=2e-3, norm=2e-2, update=0.1)
"""Activations are rounded to 2^-8 once more at each cut of a layer, so that no two layouts make the same roundings."""

SCHEDULES = ["gpipe", "1f1b", "interleaved", "zero-bubble"]
STAGES = [0, 1, 2, 3]

PlainOf = Callable[[Case, int], Trajectory]


def factorisations(size: int) -> list[Layout]:
    sizes = [n for n in range(1, size + 1) if size % n == 0]
    layouts = [Layout(tp=tp, pp=pp, dp=size // (tp * pp)) for tp in sizes for pp in sizes if size % (tp * pp) == 0]
    return [layout for layout in layouts if layout.tp <= 4 and layout.pp <= 4]  # 4 heads; 8 blocks in 4 × 2 stages


def schedules_of(layout: Layout) -> list[str]:
    return SCHEDULES if layout.pp > 1 else ["1f1b"]


def check(
    pool_of: PoolOf,
    plain: PlainOf,
    cases: Sequence[LayoutCase],
    allowed: Tolerance,
    timeout: float,
    **of_plain: Any,
) -> None:
    """`of_plain`: what is different in the plain training."""
    size = cases[0].layout.world_size
    by_rank = pool_of(size).run(train_layouts, list(cases), timeout=timeout)
    wrong = []
    for case, *paths in zip(cases, *by_rank, strict=True):
        expected = plain(replace(case.plain(), **of_plain), case.layout.dp)
        assert all(path.parameters.keys() >= expected.parameters.keys() for path in paths)
        wrong += [
            f"[{case}] rank {rank}: {line}" for rank, p in enumerate(paths) for line in problems([p], expected, allowed)
        ]
    assert not wrong, f"{len(wrong)} differences:\n" + "\n".join(wrong)


def half_of(schedules: list[str], layout: Layout, number: int) -> list[str]:
    """Of the schedules every second one, so that over two layouts, and over two stages, all are there."""
    if len(schedules) == 1:
        return schedules
    return [schedule for place, schedule in enumerate(schedules) if (place + layout.tp + layout.pp // 4 + number) % 2]


def is_default(layout: Layout, stage: int) -> bool:
    """Whether `make test` has this stage: of layouts with one data rank, where nothing is partitioned, two stages."""
    return layout.dp > 1 or stage in ((1, 2) if layout.pp == 4 else (0, 3))


def test_every_schedule_meets_every_layout_and_every_stage() -> None:
    pipelines = [layout for layout in factorisations(4) if layout.pp > 1]
    points = [(layout, stage) for layout in pipelines for stage in STAGES if is_default(layout, stage)]
    met = {(str(a), stage, s) for a, stage in points for s in half_of(SCHEDULES, a, stage)}
    assert {(layout, schedule) for layout, _, schedule in met} == {(str(a), s) for a in pipelines for s in SCHEDULES}
    assert {(stage, schedule) for _, stage, schedule in met} == {(stage, s) for stage in STAGES for s in SCHEDULES}


@pytest.mark.parametrize(
    ("layout", "stage"), thinned(itertools.product(factorisations(4), STAGES), is_default), ids=str
)
def test_float32(pool_of: PoolOf, plain: PlainOf, layout: Layout, stage: int) -> None:
    schedules = half_of(schedules_of(layout), layout, stage)
    cases = [LayoutCase(layout=layout, schedule=schedule, stage=stage) for schedule in schedules]
    check(pool_of, plain, cases, FLOAT32, timeout=120)


# The other layouts are in the nightly `test_every_schedule`: tp, dp and pp each stand here beside another axis.
@pytest.mark.parametrize(
    "layout", [each for each in factorisations(4) if 4 not in (each.pp, each.dp, each.tp)], ids=str
)
def test_bfloat16(pool_of: PoolOf, plain: PlainOf, layout: Layout) -> None:
    cases = [
        LayoutCase(layout=layout, schedule=schedule, stage=stage, dtype="bfloat16", build=rounded_gpt, whole=False)
        for number, stage in enumerate((1, 3))
        for schedule in half_of(schedules_of(layout), layout, number)
    ]
    check(pool_of, plain, cases, BFLOAT16, timeout=120)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", factorisations(4), ids=str)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_schedule(pool_of: PoolOf, plain: PlainOf, layout: Layout, stage: int, dtype: str) -> None:
    low = {"dtype": "bfloat16", "build": rounded_gpt, "whole": False} if dtype == "bfloat16" else {}
    cases = [LayoutCase(layout=layout, schedule=s, stage=stage, steps=10, **low) for s in schedules_of(layout)]
    check(pool_of, plain, cases, BFLOAT16 if low else FLOAT32, timeout=600)


@pytest.mark.parametrize("layout", [Layout(tp=2, pp=2), Layout(tp=2, dp=2), Layout(pp=2, dp=2)], ids=str)
def test_variants(pool_of: PoolOf, plain: PlainOf, layout: Layout) -> None:
    """Untied head, learned positions, biases, layer norms; recomputation; sequence parallelism; AdamW; uneven cuts."""
    cases = [
        LayoutCase(layout=layout, stage=stage, build=untied_gpt2, checkpointing="block", optimizer=adamw)
        for stage in (1, 3)
    ]
    cases.append(LayoutCase(layout=layout, stage=2, sequence=layout.tp > 1, batch=_eight_tokens, build=untied_gpt2))
    if layout.pp > 1:
        cases.append(LayoutCase(layout=layout, stage=2, cut=(5, 3)))
        cases.append(LayoutCase(layout=layout, stage=3, accumulation=1))
    check(pool_of, plain, cases, FLOAT32, timeout=120)


def test_sparse_attention(pool_of: PoolOf, plain: PlainOf) -> None:
    """Against dense attention with a mask, under every stage and axis."""
    options: list[dict[str, Any]] = [
        {"layout": Layout(dp=2), "stage": 0, "accumulation": 2},
        {"layout": Layout(dp=2), "stage": 3, "accumulation": 2, "checkpointing": "block"},
        {"layout": Layout(tp=2, dp=2), "stage": 1, "accumulation": 1},
        {"layout": Layout(tp=2, dp=2), "stage": 3, "sequence": True, "batch": even_tokens},
        {"layout": Layout(pp=2, dp=2), "stage": 2, "schedule": "zero-bubble"},
        {"layout": Layout(tp=2, pp=2), "stage": 1, "checkpointing": "block"},
    ]
    cases = [LayoutCase(**{"build": sparse_gpt, "batch": long_tokens, **each}) for each in options]
    check(pool_of, plain, cases[:2], FLOAT32, timeout=120, build=masked_gpt)
    check(pool_of, plain, cases[2:], FLOAT32, timeout=120, build=masked_gpt)


def test_feed_forward_in_tiles(pool_of: PoolOf, plain: PlainOf) -> None:
    """Against whole layers, under every stage and axis: a parameter's gradient is received once in a backward."""
    options: list[dict[str, Any]] = [
        {"layout": Layout(dp=2), "stage": 0, "accumulation": 2},
        {"layout": Layout(dp=2), "stage": 2, "accumulation": 1},
        {"layout": Layout(dp=2), "stage": 3, "accumulation": 2, "checkpointing": "block"},
        {"layout": Layout(tp=2, dp=2), "stage": 3, "sequence": True, "batch": _eight_tokens},
        {"layout": Layout(pp=2, dp=2), "stage": 2, "schedule": "zero-bubble"},
        {"layout": Layout(tp=2, pp=2), "stage": 1, "checkpointing": "block"},
    ]
    cases = [LayoutCase(**{"build": tiled_gpt, **each}) for each in options]
    check(pool_of, plain, cases[:3], FLOAT32, timeout=120, build=whole_gpt)
    check(pool_of, plain, cases[3:], FLOAT32, timeout=120, build=whole_gpt)


@pytest.mark.parametrize(
    ("layout", "build", "stages"),
    [
        pytest.param(layout, build, stages, id=f"{layout}-{build.__name__}-{stages}", marks=marks)
        for number, build in enumerate((gpt2, llama, t5, bert))
        for layout, stages, marks in (
            (Layout(tp=2, dp=2), STAGES[number % 2 :: 2], ()),
            (Layout(tp=4), [3], ()),  # With one data rank there is nothing to partition.
            (Layout(tp=2, dp=2), STAGES, pytest.mark.nightly),
            (Layout(tp=4), STAGES, pytest.mark.nightly),
        )
    ],
)
def test_hugging_face(
    pool_of: PoolOf, plain: PlainOf, layout: Layout, build: Callable[[], object], stages: list[int]
) -> None:
    cases = [LayoutCase(layout=layout, stage=s, build=build, loss=labels_loss, accumulation=2) for s in stages]
    check(pool_of, plain, cases, FLOAT32, timeout=120)


@pytest.mark.parametrize("build", [gpt2, llama])
def test_hugging_face_pipelines(pool_of: PoolOf, plain: PlainOf, build: Callable[[], object]) -> None:
    cases = [
        LayoutCase(layout=Layout(pp=2, tp=2), stage=s, build=build, loss=labels_loss, schedule=schedule)
        for s, schedule in ((1, "1f1b"), (3, "gpipe"))
    ]
    check(pool_of, plain, cases, FLOAT32, timeout=120)


def test_balance_by_measured_time(pool_of: PoolOf, plain: PlainOf) -> None:
    """All ranks cut alike, whatever each would have measured, and what is trained is the same."""
    case = LayoutCase(layout=Layout(pp=4), stage=1, balance="time")
    cuts = pool_of(4).run(_cut_of, case, timeout=60)
    assert len({*cuts}) == 1
    assert sum(cuts[0]) == 8
    assert len(cuts[0]) == 4
    assert cuts[0][1] >= cuts[0][3], "the last pipeline stage has the head and the loss to compute besides"
    check(pool_of, plain, [case], FLOAT32, timeout=60)


def _cut_of(case: LayoutCase) -> tuple[int, ...]:
    import speedlab

    engine = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    try:
        return engine.cut
    finally:
        engine.destroy(keep_parameters=False)


def _eight_tokens(step: int, index: int) -> tuple:
    """As `models.tokens`, with a length that 2 tensor ranks share out."""
    import torch

    from ranks import models

    generator = torch.Generator().manual_seed(1_000_003 * step + index)
    rows = torch.randint(models.VOCABULARY, (2, 9), generator=generator)
    return rows[:, :-1], (rows[:, 1:] + rows[:, :-1]) % models.VOCABULARY


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", factorisations(8), ids=str)
@pytest.mark.parametrize("stage", STAGES)
def test_eight_ranks(pool_of: PoolOf, plain: PlainOf, layout: Layout, stage: int) -> None:
    cases = [LayoutCase(layout=layout, schedule=schedule, stage=stage, steps=10) for schedule in schedules_of(layout)]
    check(pool_of, plain, cases, FLOAT32, timeout=600)


def _gathered(case: LayoutCase) -> tuple[dict, dict]:
    """(what `gather` gives of this rank's parameters, the whole state) before any step."""
    import speedlab

    engine = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    try:
        own = {name: speedlab.gather(parameter) for name, parameter in engine.module.named_parameters()}
        return own, engine.state_dict()
    finally:
        engine.destroy(keep_parameters=False)


@pytest.mark.parametrize("layout", [Layout(tp=4), Layout(tp=2, dp=2), Layout(tp=2, pp=2)], ids=str)
@pytest.mark.parametrize("stage", [0, 3])
def test_gather_gives_whole_parameters(pool_of: PoolOf, layout: Layout, stage: int) -> None:
    expected = dict(untied_gpt2().named_parameters())
    for own, state in pool_of(4).run(_gathered, LayoutCase(layout=layout, stage=stage, build=untied_gpt2), timeout=60):
        assert state.keys() == expected.keys()
        assert own.keys() == expected.keys() if layout.pp == 1 else own.keys() < expected.keys()
        for name, value in [*own.items(), *state.items()]:
            assert value.equal(expected[name]), name


def _refusals(case: LayoutCase) -> list[str]:
    """What is said of calls that a pipeline does not have."""
    import torch

    import speedlab

    engine: Any = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    said = []
    try:
        tokens = torch.zeros(2, 7, dtype=torch.int64)
        for call in (
            lambda: engine(tokens),
            lambda: engine.backward(torch.zeros(())),
            lambda: engine.train_batch([(tokens, tokens)]),
            lambda: engine(input_ids=tokens, labels=tokens),
            lambda: torch.no_grad()(engine)(input_ids=tokens, attention_mask=tokens),
            lambda: engine.train_batch([{"input_ids": tokens, "labels": tokens}] * 4),
            lambda: engine.evaluate([tokens]),
        ):
            try:
                call()
            except (RuntimeError, ValueError, TypeError) as error:
                said.append(str(error))
        return said
    finally:
        engine.destroy(keep_parameters=False)


def test_what_a_pipeline_does_not_have_is_told(pool_of: PoolOf) -> None:
    for said in pool_of(2).run(_refusals, LayoutCase(layout=Layout(pp=2)), timeout=60):
        called, backward, batches, *theirs, mapping, alone = said
        assert "no rank holds the whole model; train with engine.train_batch(batches)" in called
        assert backward == "under pp 2 × dp 1 × tp 1 a step is one call: engine.train_batch(batches)"
        assert batches == "train_batch: 1 micro-batches came, but batch.accumulation is 4; give as many"
        for text in (called, *theirs):
            assert "engine.train_batch(batches), evaluate with engine.evaluate(batches), both of pairs (tok" in text
        assert "a dict for GPT holds tokens and targets, tensors of (B, T), and tokens is missing" in mapping
        assert "a micro-batch is (tokens, targets) of tensors (B, T), or a dict of the model's keyword" in alone
        assert "not a Tensor; targets are the tokens one place further on" in alone


def _logits(case: LayoutCase) -> list:
    """Greedy continuations under the layout, from the engine's logits."""
    import torch

    import speedlab
    from speedlab.models import generate

    engine = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    try:
        engine.eval()
        with torch.no_grad():
            return generate(engine, torch.tensor([[3, 1, 4]]), 4, temperature=0.0, seed=0).tolist()
    finally:
        engine.destroy(keep_parameters=False)


def test_every_layout_writes_the_same_text(pool_of: PoolOf) -> None:
    (expected,) = pool_of(1).run(_logits, LayoutCase(layout=Layout()), timeout=60)
    for layout in factorisations(4):
        case = LayoutCase(layout=layout, stage=1)
        assert pool_of(4).run(_logits, case, timeout=60) == [expected] * 4, str(layout)
