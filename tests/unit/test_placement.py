"""The placement table: pure rows, what they say, and which of them are one flat."""

from __future__ import annotations

import json
from typing import Any

import pytest

from speedlab.config import RunConfig
from speedlab.layout import ShardRange
from speedlab.placement import ParamPlacement, Placement, Replication, ZeroPolicy, state_placements
from speedlab.telemetry.run_folder import RunFolder, RunFolderError
from speedlab.telemetry.tables import placement_of

REPLICATED, PARTITIONED = Replication.REPLICATED, Replication.PARTITIONED


def row(name: str, *, stage: int = 2, dp: int = 4, **changes: Any) -> ParamPlacement:
    given: dict[str, Any] = {
        "name": name,
        "unit": "blocks.0",
        "group": 0,
        "shape": (4, 2),
        "summed_over": ("dp",),
        "answered_by": 1,
        "answers": True,
        "states": state_placements(
            ZeroPolicy.of_stage(stage, dp), parameter="bfloat16", gradient="float32", master="float32"
        ),
    }
    return ParamPlacement(**(given | changes))


def placement(*rows: ParamPlacement, stage: int = 2) -> Placement:
    return Placement(rank=1, zero_policy=ZeroPolicy.of_stage(stage, 4), rows=rows)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, (REPLICATED, REPLICATED, REPLICATED)),
        (1, (REPLICATED, REPLICATED, PARTITIONED)),
        (2, (REPLICATED, PARTITIONED, PARTITIONED)),
        (3, (PARTITIONED, PARTITIONED, PARTITIONED)),
    ],
)
def test_a_stage_is_a_row_of_zeros_table(stage, expected) -> None:
    found = ZeroPolicy.of_stage(stage, 2)
    assert (found.parameters, found.gradients, found.optimizer_states) == expected
    assert ZeroPolicy.of_stage(stage, 1) == ZeroPolicy.of_stage(0, 1), "with one rank the partition is the whole"


def test_a_stage_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="ZeRO stage 4 is not one of 0, 1, 2, 3"):
        ZeroPolicy.of_stage(4, 2)


def test_flats_are_classes_of_equal_rows() -> None:
    frozen = state_placements(ZeroPolicy.of_stage(2, 4), parameter="bfloat16")
    table = placement(
        row("b", group=1),
        row("a"),
        row("other", unit="root"),
        row("still", trainable=False, states=frozen),
        row("c"),
        row("eight", states=row("x").states | {"moments": row("x").states["parameter"]}),
    )
    assert {name: [each.name for each in rows] for name, rows in table.flats.items()} == {
        "blocks.0/bfloat16": ["a", "c", "b"],  # Those of one optimizer group lie side by side.
        "root/bfloat16": ["other"],
        "blocks.0/bfloat16-frozen": ["still"],
        "blocks.0/bfloat16+": ["eight"],
    }


def test_another_residency_changes_who_holds_and_nothing_else() -> None:
    before = placement(row("a"), row("b"))
    after = before.moved(ZeroPolicy.of_stage(3, 4))
    assert after["a"].states["parameter"].holders is PARTITIONED
    assert after.moved(before.zero_policy) == before


def test_a_row_says_what_of_the_whole_is_here() -> None:
    part = ShardRange(shape=(8, 2), dim=0, ranges=((2, 4), (6, 8)))
    cut = row("cut", part=part, cut_over=("tp",), summed_over=("tp", "dp"), scale=1 / 8, answered_by=0, answers=False)
    reported = json.loads(json.dumps(cut.described()))
    assert reported["whole_shape"] == [8, 2]
    assert reported["part"] == [0, [[2, 4], [6, 8]]]
    assert reported["states"]["master"] == {"holders": "partitioned", "where": "device", "form": "float32"}
    head, line = str(placement(cut)).splitlines()
    assert head.split()[:2] == ["parameter", "unit"]
    assert "4×2 by tp" in line
    assert "tp then dp, × 0.125" in line
    assert "rank 0" in line
    assert "bfloat16 replicated" in line
    assert "float32 partitioned" in line


def test_what_has_no_dimensions_is_one_number() -> None:
    assert "1 number" in str(placement(row("scale", shape=())))


def test_a_run_folder_keeps_what_each_rank_told(tmp_path) -> None:
    folder = RunFolder.create(RunConfig(folder=tmp_path, name="told"))
    with pytest.raises(RunFolderError, match="rank 0 has reported no placement; no rank has yet"):
        placement_of(folder, 0)
    folder.write_placement(1, placement(row("a")).described())
    table = placement_of(folder, 1)
    assert [each["name"] for each in table] == ["a"]
    assert "rank 1 and its dp peers" in str(table)
    assert "<td>a</td>" in table._repr_html_()
    with pytest.raises(RunFolderError, match="rank 7 has reported no placement; ranks 1 to 1 have"):
        placement_of(folder, 7)
