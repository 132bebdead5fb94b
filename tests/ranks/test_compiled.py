"""Blocks that go through torch.compile, between ranks that share a computation: the same training."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from grids import thinned

from ranks.conftest import PoolOf
from ranks.layout_cases import LayoutCase, train_layouts
from ranks.loops import Case, Trajectory, engine_for, engine_step, problems
from ranks.test_context import by_tokens, in_ring, long_gpt, many, ring_gpt
from ranks.test_layouts import FLOAT32, PlainOf
from ranks.test_packing import case_of
from speedlab.layout import Layout

SMALL: dict[str, Any] = {"build": partial(long_gpt, layers=2), "batch": many, "accumulation": 2, "steps": 2}

CASES = [
    LayoutCase(layout=Layout(cp=2), stage=3, cp_heads=1, checkpointing="block", **SMALL),
    LayoutCase(layout=Layout(tp=2), stage=1, checkpointing="block", partition_inputs=True, **SMALL),
]

MORE = [
    LayoutCase(layout=Layout(cp=2), stage=1, cp_heads=2, **SMALL),
    LayoutCase(layout=Layout(cp=2), stage=1, cp_heads=1, **{**SMALL, "build": ring_gpt, "batch": in_ring}),
    LayoutCase(layout=Layout(tp=2), stage=3, sequence=True, **SMALL),
    case_of(Layout(cp=2), 2, accumulation=2, steps=3, cp_heads=1),
]

FOUR = [LayoutCase(layout=Layout(cp=2, **{axis: 2}), stage=1, cp_heads=1, **SMALL) for axis in ("tp", "pp", "dp")]


def train_compiled(cases: list[LayoutCase], backend: str) -> tuple[list[Trajectory], int]:
    """(what each training did, graphs that were compiled)"""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compile_ = torch.compile
    if backend != "inductor":
        torch.compile = lambda forward, **_: compile_(forward, backend=backend)  # pyright: ignore[reportAttributeAccessIssue]  # as it is called
    try:
        paths = train_layouts([replace(case, compile=True) for case in cases])
    finally:
        torch.compile = compile_
    return paths, counters["stats"]["unique_graphs"]


def check(compiling_pool_of: PoolOf, plain: PlainOf, cases: list[LayoutCase], backend: str, timeout: float) -> None:
    for paths, graphs in compiling_pool_of(cases[0].layout.world_size).run(
        train_compiled, cases, backend, timeout=timeout
    ):
        assert graphs > 0
        for case, path in zip(cases, paths, strict=True):
            build = by_tokens if case.build is ring_gpt else case.build
            assert problems([path], plain(replace(case.plain(), build=build), case.layout.dp), FLOAT32) == [], case


def test_as_they_are_traced(compiling_pool_of: PoolOf, plain: PlainOf) -> None:
    """Without the compiler's own kernels, which take half a minute to build."""
    check(compiling_pool_of, plain, CASES, "aot_eager", timeout=120)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_compiled(compiling_pool_of: PoolOf, plain: PlainOf) -> None:
    check(compiling_pool_of, plain, CASES + MORE, "inductor", timeout=300)
    for case in FOUR:
        check(compiling_pool_of, plain, [case], "inductor", timeout=300)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
def test_dropout_drops_what_an_uncompiled_block_drops(compiling_pool_of: PoolOf, backend: str) -> None:
    case = LayoutCase(layout=Layout(), stage=1, whole=False, **{**SMALL, "build": partial(long_gpt, dropout=0.2)})
    (alone,) = compiling_pool_of(1).run(train_layouts, [case], timeout=60)[0]
    alone.start = {name: parameter.detach() for name, parameter in case.build().named_parameters()}
    ((path,), graphs), *_ = compiling_pool_of(1).run(train_compiled, [case], backend, timeout=120)
    assert graphs > 0
    assert problems([path], alone, FLOAT32) == []


# ---- what the caller has compiled ------------------------------------------------------------------------------------


def nothing(model: Any, backend: Any) -> Any:
    return model


def whole(model: Any, backend: Any) -> Any:
    return torch.compile(model, backend=backend)


def whole_in_place(model: Any, backend: Any) -> Any:
    model.compile(backend=backend)
    return model


def blocks_in_place(model: Any, backend: Any) -> Any:
    for block in model.blocks:
        block.compile(backend=backend)
    return model


def parts(model: Any, backend: Any) -> Any:
    for block in model.blocks:
        block.attention = torch.compile(block.attention, backend=backend)
        block.up.compile(backend=backend)
    return model


def train_what_was_compiled(case: Case, compiled: Any) -> tuple[list[float], int]:
    """(the mean losses of all ranks, graphs that were compiled)"""
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    with engine_for(case, model=compiled(case.build(), backend)) as engine:
        losses = []
        for step in range(case.steps):
            engine_step(engine, case, step)
            losses.append(engine.totals.loss)
        with torch.no_grad():
            losses.append(float(engine(*case.batch(9, 0))))
    return losses, graphs


@pytest.mark.parametrize(
    ("compiled", "stage"),
    thinned(
        itertools.product([whole, whole_in_place, blocks_in_place, parts], [1, 3]),
        lambda compiled, stage: stage == (1 if compiled is parts else 3),
    ),
)
def test_what_the_caller_has_compiled(compiling_pool_of: PoolOf, compiled: Any, stage: int) -> None:
    """Hooks are no part of a graph: what they do would be traced, once, in place of being done."""
    case = Case(stage=stage, bucket_bytes=1, steps=4)
    plain = compiling_pool_of(2).run(train_what_was_compiled, case, nothing, timeout=60)
    for losses, graphs in compiling_pool_of(2).run(train_what_was_compiled, case, compiled, timeout=120):
        assert graphs > 0
        assert losses == pytest.approx(plain[0][0], abs=2e-6)
