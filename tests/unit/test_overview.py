"""What stays of a run in a notebook: a picture without a script, and a table, whatever its texts are."""

from __future__ import annotations

import base64
import re
from xml.etree import ElementTree

import pytest
from telemetry_samples import make_event, make_record

from speedlab.display.figure_style import Figure
from speedlab.hardware import Device
from speedlab.telemetry.figures import figures
from speedlab.telemetry.overview import overview
from speedlab.telemetry.records import Ledger
from speedlab.telemetry.series import History

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
        for told in texts(figure):
            assert not re.search(r"<(?!(br|/?b|/?extra)>)", told), (name, told)


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
