"""States away from the device: the same bits as on it, whatever the stage, the place and the optimizer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grids import thinned

import speedlab
from ranks import models
from ranks.conftest import PoolOf
from ranks.layout_cases import LayoutCase, train_layouts
from ranks.loops import Case, adamw, sgd, train_cases
from speedlab.layout import Layout

PLACES = [
    {"optimizer": "disk"},
    {"optimizer": "disk", "parameters": "disk"},
    {"optimizer": "host", "parameters": "disk"},
    {"optimizer": "host"},
    {"optimizer": "disk", "parameters": "host"},
]


def cases(stage: int, dtype: str) -> list[tuple[Case, Case]]:
    """(where everything is on the device, where it is not)."""
    found = []
    for number, places in enumerate(PLACES):
        if stage < 3 and "parameters" in places:
            continue
        case = Case(
            stage=stage,
            dtype=dtype,
            build=models.transformer if dtype == "float32" else models.rounded_transformer,
            accumulation=1 + number % 2,
            checkpointing="block" if number % 3 == 0 else "none",
            optimizer=adamw if number != 3 else sgd,
            clip_norm=0.3 if number % 2 == 0 else None,
            steps=5,
        )
        found.append((case, replace(case, offload=tuple(places.items()))))
    return found


@pytest.mark.parametrize(
    ("stage", "dtype", "size"),
    thinned(
        itertools.product((0, 1, 2, 3), ("float32", "bfloat16"), (1, 2)),
        lambda stage, dtype, size: (stage + (dtype == "float32") + size) % 2 == 0,
    ),
)
def test_same_bits_as_on_the_device(pool_of: PoolOf, size: int, stage: int, dtype: str) -> None:
    pairs = cases(stage, dtype)
    by_rank = pool_of(size).run(train_cases, [case for pair in pairs for case in pair])
    for rank, paths in enumerate(by_rank):
        for (_, case), here, away in zip(pairs, paths[::2], paths[1::2], strict=True):
            assert away.losses == here.losses, f"rank {rank}, {case}"
            assert away.norms == here.norms, f"rank {rank}, {case}"
            different = [n for n, p in away.parameters.items() if not p.equal(here.parameters[n])]
            assert not different, f"rank {rank}, {case}: {different}"


ROUTE = [
    {"zero": 3, "offload": {"optimizer": "disk", "parameters": "disk"}},
    {"offload": {"optimizer": "host", "parameters": "none"}},
    {"zero": 1, "offload": {"optimizer": "disk"}},
    {"zero": 0, "offload": {"optimizer": "none"}},
    {"zero": 3, "offload": {"optimizer": "disk", "parameters": "host"}},
    {"zero": 2, "offload": {"optimizer": "none", "parameters": "none"}},
]
"""Changes of shape, one after each step."""


def travel(
    case: Case, changes: list[dict[str, Any]], folder: str | None
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of steps with a change after each, and the parameters afterwards; with `folder` a save and a load between
    a step and its change."""
    engine, *_ = speedlab.initialize(model=case.build(), optimizer=case.optimizer, config=case.config())
    world, rank = engine.world.size, engine.world.rank
    losses = []
    for step in range(len(changes) + 1):
        losses.append(engine.train_batch([case.batch(step, m * world + rank) for m in range(case.accumulation)]))
        if folder is not None:
            saved = engine.save_checkpoint(folder)
            engine.train_batch([case.batch(99, m * world + rank) for m in range(case.accumulation)])
            engine.load_checkpoint(saved)
        if step < len(changes):
            engine.reshape(**changes[step])
    state = engine.state_dict()
    engine.destroy()
    return losses, state


@pytest.mark.parametrize(
    ("size", "dtype"),
    thinned(
        itertools.product((1, 2), ("float32", "bfloat16")), lambda size, dtype: (size == 1) == (dtype == "float32")
    ),
)
def test_states_travel_in_every_direction(pool_of: PoolOf, tmp_path: Path, size: int, dtype: str) -> None:
    """Reshapes, saves and loads between any two places leave every bit where it was."""
    build = models.transformer if dtype == "float32" else models.rounded_transformer
    case = Case(stage=2, dtype=dtype, build=build, optimizer=adamw, accumulation=3 - size, clip_norm=0.3)
    pool = pool_of(size)
    stays = pool.run(travel, case, [{} for _ in ROUTE], None)[0]
    for folder in (None, str(tmp_path / "checkpoints")):
        for losses, state in pool.run(travel, case, ROUTE, folder):
            assert losses == stays[0]
            assert not [name for name, value in state.items() if not value.equal(stays[1][name])]


@pytest.mark.parametrize(
    ("size", "pp", "tp"),
    thinned([(2, 2, 1), (2, 1, 2), (4, 2, 1), (4, 1, 2)], lambda size, pp, tp: size // 2 == pp),
)
def test_under_every_axis(pool_of: PoolOf, size: int, pp: int, tp: int) -> None:
    here = LayoutCase(layout=Layout.for_world(size, pp=pp, tp=tp), stage=3, steps=3, optimizer=adamw)
    away = replace(here, offload=(("optimizer", "disk"), ("parameters", "disk")))
    for on_device, on_disk in pool_of(size).run(train_layouts, [here, away]):
        assert on_disk.losses == on_device.losses
        assert on_disk.norms == on_device.norms
        assert not [name for name, value in on_disk.parameters.items() if not value.equal(on_device.parameters[name])]
