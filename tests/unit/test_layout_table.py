"""Where each rank stands in a layout, as rows and as they are shown."""

from __future__ import annotations

from speedlab.hardware import cpu_devices
from speedlab.layout import Layout
from speedlab.telemetry.tables import layout_table


def test_every_rank_has_its_stage_blocks_indices_and_device() -> None:
    devices = cpu_devices(4)
    table = layout_table(Layout(pp=2, tp=2), (2, 4), devices=devices, hosts=["<here>"] * 4)
    assert [(row["rank"], row["stages"], row["blocks"], row["dp"], row["tp"]) for row in table] == [
        (0, (0,), ((0, 1),), 0, 0),
        (1, (0,), ((0, 1),), 0, 1),
        (2, (1,), ((2, 5),), 0, 0),
        (3, (1,), ((2, 5),), 0, 1),
    ]
    assert [row["device"] for row in table] == [device.name for device in devices]
    lines = str(table).splitlines()
    assert lines[0].split() == ["rank", "pipeline", "stage", "dp", "index", "tp", "index", "device", "host"]
    assert "1 (blocks 2–5)" in lines[3]
    assert "<td>&lt;here&gt;</td>" in table._repr_html_()


def test_a_rank_may_hold_several_stages() -> None:
    table = layout_table(Layout(pp=2, dp=2), (1, 2, 1, 3), chunks=2)
    assert [row["stages"] for row in table] == [(0, 2), (0, 2), (1, 3), (1, 3)]
    assert table[2]["blocks"] == ((1, 2), (4, 6))
    assert table.cells()[0] == ("0", "0 (block 0), 2 (block 3)", "0", "0")


def test_blocks_that_are_not_known_are_left_out() -> None:
    assert layout_table(Layout(pp=2)).cells() == [("0", "0", "0", "0"), ("1", "1", "0", "0")]


def test_uneven_stages_of_the_announced_model() -> None:
    """298 blocks on 50 pipeline stages."""
    counts = (6,) * 48 + (5, 5)
    table = layout_table(Layout(pp=50), counts)
    assert table[49]["blocks"] == ((293, 297),)


def test_an_axis_that_few_use_has_a_column_where_it_is_used() -> None:
    lines = str(layout_table(Layout(cp=2, tp=2))).splitlines()
    assert lines[0].split() == ["rank", "pipeline", "stage", "dp", "index", "cp", "index", "tp", "index"]
    assert [line.split() for line in lines[1:]] == [[str(r), "0", "0", str(r // 2), str(r % 2)] for r in range(4)]
