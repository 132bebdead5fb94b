"""Selective recomputation: to the bit what is computed without, in less memory, and no collective twice."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import speedlab
from ranks.conftest import PoolOf
from ranks.layout_cases import LayoutCase, batches, gpt, gpt2, labels_loss, llama, long_tokens, sparse_gpt, tiled_gpt
from ranks.loops import Trajectory
from ranks.test_context import in_ring, long_gpt, many, ring_gpt
from speedlab.layout import Layout

dropping = partial(gpt, dropout=0.2)
AWAY = (("optimizer", "disk"), ("parameters", "disk"))

CASES: dict[str, list[dict[str, Any]]] = {
    "one rank": [
        {"layout": Layout(), "stage": 0, "build": sparse_gpt, "batch": long_tokens},
        {"layout": Layout(), "stage": 3, "build": dropping, "offload": AWAY, "whole": False},
        {"layout": Layout(), "stage": 2, "dtype": "bfloat16"},
        {"layout": Layout(), "stage": 0, "build": llama, "loss": labels_loss},
        {"layout": Layout(), "stage": 1, "build": gpt2, "loss": labels_loss},
    ],
    "two ranks": [
        {"layout": Layout(dp=2), "stage": 3, "build": partial(gpt, norm="layer", bias=True)},
        {"layout": Layout(tp=2), "stage": 1, "build": dropping},
        {"layout": Layout(tp=2), "stage": 0, "build": tiled_gpt},
        {"layout": Layout(pp=2), "stage": 1, "schedule": "zero-bubble", "build": dropping},
        {"layout": Layout(cp=2), "stage": 1, "cp_heads": 1, "build": long_gpt, "batch": many},
        {"layout": Layout(cp=2), "stage": 1, "cp_heads": 1, "build": ring_gpt, "batch": in_ring},
    ],
    "two ranks, more": [
        {"layout": Layout(tp=2), "stage": 3, "sequence": True, "build": long_gpt, "batch": many},
        {"layout": Layout(pp=2), "stage": 2, "schedule": "interleaved"},
        {"layout": Layout(cp=2), "stage": 3, "cp_heads": 2, "build": long_gpt, "batch": many},
    ],
}


def train(case: LayoutCase) -> tuple[Trajectory, dict[str, int], int]:
    """(what the training did, bytes sent in its last step by collective, activations at that step's peak)"""
    path, sent, activations = Trajectory(), {}, 0
    engine: Any = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())[0]
    try:
        for step in range(case.steps):
            engine.traffic.take()
            with engine.trace_activations():
                path.losses.append(engine.train_batch(batches(case, step, engine.mesh.data_index)))
            sent = dict(engine.traffic.take().sent_bytes)
            path.norms.append(engine.global_grad_norm)
            activations = engine.ledger().activations
        path.parameters = engine.state_dict()
    finally:
        engine.destroy(keep_parameters=False)
    return path, sent, activations


def all_kinds(cases: list[LayoutCase]) -> list[dict[str, tuple[Trajectory, dict[str, int], int]]]:
    kinds = "none", "selective", "block"
    return [{kind: train(replace(case, checkpointing=kind)) for kind in kinds} for case in cases]


@pytest.mark.parametrize("ranks", ["one rank", "two ranks", pytest.param("two ranks, more", marks=pytest.mark.nightly)])
def test_to_the_bit_with_fewer_bytes(pool_of: PoolOf, ranks: str) -> None:
    cases = [LayoutCase(**{"accumulation": 2, "steps": 3, **options}) for options in CASES[ranks]]
    for of_rank in pool_of(cases[0].layout.world_size).run(all_kinds, cases, timeout=240):
        for case, found in zip(cases, of_rank, strict=True):
            (plain, sent, most), (path, once, fewer), (_, _, least) = found.values()
            assert path.losses == plain.losses, case
            assert path.norms == plain.norms, case
            for name, expected in plain.parameters.items():
                assert torch.equal(path.parameters[name], expected), (str(case), name)
            assert once == sent, case
            assert fewer < most, case
            if case.build not in (tiled_gpt, gpt2, llama):
                assert least < fewer, case
