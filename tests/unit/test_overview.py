"""What stays of a run in a notebook: a picture without a script, and a table, whatever its texts are."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree

import pytest
from telemetry_samples import make_event, make_record

from speedlab.display.figure_style import Figure
from speedlab.display.svg import figure_svg
from speedlab.hardware import Device
from speedlab.telemetry.figures import figures
from speedlab.telemetry.figures.lessons import compare_lines
from speedlab.telemetry.figures.overview import overview
from speedlab.telemetry.history import History
from speedlab.telemetry.records import Ledger

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "<a href='javascript:alert(1)'>click</a>",
    "]]><!--",
    "&lt;b&gt;",
    "<b>bold<br>two",
    "%{x} <extra>",
    "\x00\x1b[31m\ud800",
    "名前 \u202e gnp.exe",
]


def history(text: str = "text", steps: int = 3) -> History:
    ledger = Ledger(parameters=3 * 2**20, gradients=2**20, capacity_bytes=5 * 2**20)
    records = {
        rank: [
            make_record(step, rank, loss=8 - step / 10, ledger=ledger, heldout_loss=7.0 if step == 2 else None)
            for step in range(1, steps + 1)
        ]
        for rank in range(2)
    }
    link = {"pretended_link": {"text": text}, "peak_flops": 1e10}
    change = {"before": {"zero": 2}, "after": {"zero": 3}}
    events = [make_event("started", details=link), make_event("reshaped", 2, text=text, details=change)]
    return History.of(records, [*events, make_event(text, 3, text=text), make_event("warning", 3, text=text)])


def device(name: str) -> Device:
    sizes = {"capacity_bytes": 2**30, "free_bytes": 2**30}
    return Device(kind="cpu", name=name, uuid="", cores=(0,), threads=1, fast_dtype="float32", **sizes)


@pytest.mark.parametrize("text", HOSTILE)
def test_foreign_text_stays_text(text: str) -> None:
    svg, page = overview(history(text), title=text, devices=[device(text)] * 2)
    root = ElementTree.fromstring(svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {"svg", "g", "rect", "path", "text", "title"}
    assert not [name for element in root.iter() for name in element.attrib if name.startswith("on") or "href" in name]
    (image,) = re.findall(r"<img[^>]*>", page)
    assert base64.b64decode(re.search('base64,([^"]*)"', image).group(1)).decode() == svg  # pyright: ignore
    tags = set(re.findall(r"<([a-z]+)", page.replace(image, "")))
    assert tags == {"details", "summary", "table", "caption", "tr", "th", "td"}
    for name, figure in figures(history(text), devices=[device(text)] * 2).items():
        for reported in texts(figure):
            assert not re.search(r"<(?!(br|/?b|/?extra)>)", reported), (name, reported)


@pytest.mark.parametrize(("letters", "size"), [(0, 15.0), (20, 15.0), (150, 13.5), (1000, 8.0)])
def test_a_long_title_is_smaller_so_that_its_end_is_seen(letters: int, size: float) -> None:
    svg, _ = overview(history(), title="n" * letters)
    title = ElementTree.fromstring(svg).find(f"{SVG}text")
    assert title is not None
    assert (title.text or "", float(title.attrib["font-size"])) == ("n" * letters, size)


def test_every_figure_of_a_run_is_drawn_by_itself_or_left_to_plotly() -> None:
    made = figures(history())
    drawn = {name for name, figure in made.items() if figure_svg(figure) is not None}
    assert drawn == made.keys() - {"gradient", "kernels", "communication"}  # Powers, and bars that lie.
    bar = {"type": "bar", "name": "a", "y": [1.0], "marker": {"color": "#000000", "line": {"width": 0}}}
    layout = compare_lines({"a": [(1, 1.0)]}, title="t", across="", unit="s")["layout"]
    named = {**layout, "xaxis": {"type": "category"}}
    words = {"type": "scatter", "mode": "text", "x": ["run"], "y": [1.0], "text": ["1 B"]}
    assert "run" in str(figure_svg({"data": [{**bar, "x": ["run"]}, words], "layout": named}))
    assert figure_svg({"data": [{**bar, "x": [["run"], ["host"]]}], "layout": layout}) is None
    assert figure_svg({"data": [{**words, "mode": "lines"}], "layout": named}) is None
    assert "<svg" in str(figure_svg({"data": [{**bar, "x": [1.0]}], "layout": {}}))  # A layout may leave out all.


def test_one_figure_is_drawn_by_itself_unless_its_axes_are_of_powers() -> None:
    curves = {"<b>one</b>": [(1, 8.0), (2, 4.0)]}
    svg = figure_svg(compare_lines(curves, title="a step", across="<i>tokens of a sequence</i>", unit="s"))
    assert svg is not None
    root = ElementTree.fromstring(svg)
    assert (root.attrib["aria-label"], root.attrib["width"]) == ("a step", "620")
    words = [element.text for element in root.iter(f"{SVG}text")]
    assert {"one", "<i>tokens of a sequence</i>", "a step, s"} <= set(words)
    assert figure_svg(compare_lines(curves, title="a step", across="tokens", unit="s", log=True)) is None


def texts(value: Figure | list | str | object) -> list[str]:
    """All texts of a figure that plotly makes markup of."""
    if isinstance(value, dict):
        return [text for item in value.values() for text in texts(item)]
    if isinstance(value, list):
        return [text for item in value for text in texts(item)]
    return [value] if isinstance(value, str) else []


def test_a_run_of_many_steps_is_small_and_one_without_any_is_drawn() -> None:
    svg, page = overview(history(steps=5000), title="long")
    assert len(svg) < 25_000
    assert len(page) < 40_000
    ElementTree.fromstring(overview(History(), title="empty")[0])
