"""Static overview of a run, or of several, for saved notebooks: a picture and tables of the same numbers."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from html import escape

import numpy as np

from speedlab.display.figure_style import Figure
from speedlab.display.svg import figures_svg, plain_text
from speedlab.hardware import Device
from speedlab.telemetry.figures.compare import RunStanding, compared_figures, facts_table, settings_table
from speedlab.telemetry.figures.memory import memory_figure, states_are_small, states_figure
from speedlab.telemetry.figures.pipeline import pipeline_figure
from speedlab.telemetry.figures.steps import anatomy_figure, cut_for, loss_figure, throughput_figure
from speedlab.telemetry.history import History
from speedlab.telemetry.trace import timeline_of

_POINTS = 100
_BARS = 40


def overview_figures(history: History, *, devices: Sequence[Device] = ()) -> list[Figure]:
    """Return the four main plots with few points, and the pipeline's timeline if there is one.

    Args:
        history: The run's data.
        devices: Devices by rank, for labels.
    """
    timeline = timeline_of(history.records)
    return [
        (states_figure if states_are_small(history) else memory_figure)(history, devices=devices),
        loss_figure(history, cut_for(history, _POINTS)),
        throughput_figure(history, cut_for(history, _POINTS)),
        anatomy_figure(history, cut_for(history, _BARS)),
        *([] if timeline is None else [pipeline_figure(timeline, devices=devices)]),
    ]


def overview(history: History, *, title: str, devices: Sequence[Device] = ()) -> tuple[str, str]:
    """Return (SVG, HTML with the same picture and a table of the numbers).

    Args:
        history: The run's data.
        title: The headline, as plain text.
        devices: Devices by rank, for labels.
    """
    plots = overview_figures(history, devices=devices)
    svg = figures_svg(plots, title=title)
    tables = "".join(_table(plain_text(plot["layout"]["title"]["text"]), list(_lines(plot))) for plot in plots[:4])
    return svg, f"{picture_html(svg, title)}<details><summary>Numbers</summary>{tables}</details>"


def picture_html(svg: str, title: str) -> str:
    """Return the picture as an image element. An image cannot run scripts, so that an untrusted notebook shows it, too.

    Args:
        svg: The picture.
        title: Alternative text.
    """
    source = f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"
    return f'<img alt="{escape(title)}" src="{source}" style="max-width:100%">'


def _lines(figure: Figure) -> Iterator[list[str]]:
    """Yield the head and the rows of a table: the bars of each category, or first, lowest, highest and last of each
    curve.
    """
    data, layout = figure["data"], figure["layout"]
    unit = plain_text(layout["yaxis"]["title"]["text"])
    if layout["xaxis"].get("type") == "category":
        yield [unit, *(plain_text(str(name)) for name in (data[0]["x"] if data else ()))]
        for trace in data:
            yield [trace["name"], *(_number(value) for value in trace["y"])]
        return
    yield [unit, "first", "lowest", "highest", "last", "at step"]
    for trace in data:
        seen = np.isfinite(np.asarray(trace["y"], dtype=float))
        x, y = np.asarray(trace["x"])[seen], np.asarray(trace["y"])[seen]
        if len(y):
            yield [trace["name"], *map(_number, (y[0], y.min(), y.max(), y[-1])), f"{x[-1]:,.0f}"]


def _number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"


def _table(caption: str, lines: list[list[str]]) -> str:
    def row(cells: list[str], tag: str) -> str:
        first, *others = (escape(cell) for cell in cells)
        return f"<tr><th>{first}</th>{''.join(f'<{tag}>{cell}</{tag}>' for cell in others)}</tr>"

    head, *body = lines
    rows = "".join(row(cells, "td") for cells in body)
    return f"<table><caption>{escape(caption)}</caption>{row(head, 'th')}{rows}</table>"


def compared_overview(looks: Sequence[RunStanding]) -> tuple[str, str]:
    """Return (SVG, HTML with the same picture and tables of the results and of the settings that differ).

    Args:
        looks: The present state of each run.
    """
    title = " · ".join(look.name for look in looks)
    svg = figures_svg(list(compared_figures(looks).values()), title=title)
    tables = facts_table(looks)._repr_html_() + settings_table(looks)._repr_html_()
    return svg, f"{picture_html(svg, title)}{tables}"
