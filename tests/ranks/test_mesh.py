"""The mesh of named axes on real ranks: groups, torch's DeviceMesh on the same connections, and what rows say of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import speedlab
from ranks import models
from ranks.conftest import PoolOf
from speedlab.comm import CommStats, World
from speedlab.layout import AXES, Layout
from speedlab.parallel.mesh import Mesh


def sums_by_axis(layout: Layout) -> dict[str, tuple[float, float]]:
    """For each axis the sum of the ranks along it, by our group and by torch's DeviceMesh."""
    rank = dist.get_rank()
    mesh = Mesh(layout, World(rank=rank, size=4, device=torch.device("cpu")), CommStats())
    found = {}
    for axis in AXES:
        own, theirs = mesh[axis].sum(torch.tensor([float(rank)])), torch.tensor([float(rank)])
        dist.all_reduce(theirs, group=mesh.device_mesh[axis].get_group())
        found[axis] = own.item(), theirs.item()
    assert mesh.device_mesh.mesh_dim_names == AXES
    mesh.disconnect()
    return found


@pytest.mark.parametrize("layout", [Layout(pp=2, dp=2), Layout(cp=2, tp=2)], ids=str)
def test_torchs_mesh_has_the_same_groups(pool_of: PoolOf, layout: Layout) -> None:
    for rank, found in enumerate(pool_of(4).run(sums_by_axis, layout)):
        expected = {axis: float(sum(layout.peers(rank, axis))) for axis in AXES}
        assert found == {axis: (value, value) for axis, value in expected.items()}


def rows(stage: int) -> tuple[list[dict[str, Any]], dict[str, int]]:
    config = {"zero": stage, "parallel": {"tp": 2}, "precision": "bfloat16", "batch": {"micro_size": 2}}
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    engine = speedlab.initialize(model=models.transformer(), config=config, tp_plan=plan)[0]
    table, held = engine.placement, {flat.name: flat.shard.numel() for flat in engine.flats}
    assert list(held) == list(table.flats)
    engine.destroy()
    return table.described(), held


def test_every_parameter_is_answered_for_once(pool_of: PoolOf) -> None:
    """By one rank of the tensor axis; what is cut by each for its part."""
    reported = [each for each, _ in pool_of(4).run(rows, 3)]
    by_name = [{row["name"]: row for row in table} for table in reported]
    for name, row in by_name[0].items():
        own = [table[name]["answered_by"] for table in by_name]
        cut = bool(row["cut_over"])
        assert own == ([0, 1, 2, 3] if cut else [0, 0, 2, 2]), name
        assert row["states"]["parameter"] == {"holders": "partitioned", "where": "device", "form": "bfloat16"}
        assert row["states"]["master"]["form"] == "float32"
    assert any(row["cut_over"] for row in reported[0])
