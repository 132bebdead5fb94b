"""The bars of panel and plan: what is filled, and what is drawn in strokes."""

from __future__ import annotations

import re

import pytest

from speedlab.display.figure_style import COLOURS, bar_marker, swatch
from speedlab.display.svg import Bar, bars_svg

MIB = 2**20


def test_what_is_outside_the_framework_is_hatched_and_nothing_else() -> None:
    bar = Bar(label="rank 0", categories={"parameters": 40 * MIB, "outside_framework": 60 * MIB})
    svg = bars_svg([bar], 120 * MIB, what="memory")
    assert svg.count("<path") == 1
    assert f'fill="{COLOURS["parameters"]}"' in svg
    assert f'stroke="{COLOURS["outside_framework"]}"' in svg
    assert "outside the framework 60.0 MiB" in svg, "pointing at it still tells what it is"
    only = bars_svg([Bar(label="rank 0", categories={"parameters": 40 * MIB})], 120 * MIB, what="memory")
    assert "<path" not in only


@pytest.mark.parametrize("outside", [1, 60 * MIB, 900 * MIB])
def test_strokes_stay_in_their_rectangle(outside: int) -> None:
    svg = bars_svg([Bar(label="", categories={"outside_framework": outside})], 1000 * MIB, what="memory")
    found = re.search(r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)" fill="transparent"', svg)
    assert found is not None
    left, high, width, height = map(float, found.groups())
    drawn = re.search(r'<path d="([^"]*)"', svg)
    assert drawn is not None
    points = [(float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", drawn[1])]
    assert len(points) % 2 == 0
    assert points or height < 5
    for x, y in points:
        assert left - 0.1 <= x <= left + width + 0.1
        assert high - 0.2 <= y <= high + height + 0.2


def test_plots_and_legends_agree() -> None:
    assert swatch("parameters") == COLOURS["parameters"] == bar_marker("parameters")["color"]
    assert "repeating-linear-gradient" in swatch("outside_framework")
    assert bar_marker("outside_framework")["pattern"]["fgcolor"] == COLOURS["outside_framework"]
