"""Write `report.html`: a page about a run that works without a server, a kernel or a network."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from speedlab import __version__
from speedlab.config import describe
from speedlab.display.formatting import bytes_text, count_text, seconds_text
from speedlab.display.optional_dependencies import extras
from speedlab.planner import parameter_count
from speedlab.telemetry.feed import Feed
from speedlab.telemetry.figures import History, figures, header, plain
from speedlab.telemetry.proof import read_proof
from speedlab.telemetry.run_folder import RunFolder, RunFolderError, write_atomically

_TEMPLATE = Path(__file__).with_name("report_template.html")

_TEXT_COLUMNS = ("what happened",)
_STATE_COLUMNS = ("parameters", "gradients", "optimizer")


def write_report(
    folder: RunFolder | str | os.PathLike[str], table_rows: Sequence[Mapping[str, Any]] | None = None
) -> Path:
    """Write `report.html` into a run folder and return its path.

    The page contains everything it needs, including plotly, and loads nothing from a network.

    Args:
        folder: The run folder.
        table_rows: Rows by ZeRO stage, as `run.table()` returns them. Without them, the page has no such table.

    Raises:
        RunFolderError: `folder` holds no run.
    """
    feed = Feed(folder)
    try:
        feed.poll(files=True)
    finally:
        feed.close()
    path = feed.folder.path / "report.html"
    write_atomically(path, report_html(feed, table_rows or ()), mode=0o644)
    return path


def report_html(feed: Feed, table_rows: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return the page for the data that `feed` has read so far.

    Args:
        feed: The run.
        table_rows: Rows by ZeRO stage, as `run.table()` returns them.
    """
    history = History.of(feed.records, feed.events)
    head = header(history, name=feed.folder.name, status=feed.status)
    plots = figures(history)
    text = feed.status.reported
    parts = {
        "name": escape(feed.folder.name),
        "header": escape(head.text.partition(" · ")[2]),
        "state": escape(f"{head.mark} {head.state}"),
        "status_text": f'<p class="card">{escape(text)}</p>' if text else "",
        "plots": "".join(f'<div class="card"><div class="plot" id="plot-{name}"></div></div>' for name in plots),
        "tables": _stage_table(table_rows)
        + _proof(feed)
        + _attention(feed)
        + _event_table(feed)
        + _configuration(feed),
        "version": escape(__version__),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "plotly": _plotly_source(),
        "figures": _script_json(plain(plots)),
    }
    template = _TEMPLATE.read_text(encoding="utf-8")
    # Substitute in one pass, so that inserted text with braces is never substituted again.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _plotly_source() -> str:
    with extras():
        from plotly.offline import get_plotlyjs

    return get_plotlyjs()


def _script_json(value: Any) -> str:
    """Return JSON that is safe inside a script element: it cannot close the element or open a comment."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _table(caption: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; cells must be HTML already."""
    kinds = [' class="text"' if name in _TEXT_COLUMNS else "" for name in head]
    cells = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{cell}</td>" for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return (
        f'<h2>{escape(caption)}</h2><div class="card scroll"><table><thead><tr>{cells}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _stage_table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    body = []
    for row in rows:
        states = [_alongside_formula(row, name) for name in _STATE_COLUMNS]
        speed, change = row.get("tokens_per_second"), row.get("change_seconds")
        body.append(
            [
                escape(f"{row.get('stage', '')}"),
                *states,
                f"{count_text(speed)} tokens/s" if speed is not None else "",
                seconds_text(change) if change is not None else "–",
            ]
        )
    head = ["stage", *(f"{name}, measured (formula)" for name in _STATE_COLUMNS), "speed", "time the change took"]
    return _table("What a rank holds at each ZeRO stage", head, body)


def _alongside_formula(row: Mapping[str, Any], name: str) -> str:
    measured, formula = row.get(name), row.get(f"formula_{name}")
    text = bytes_text(measured) if measured is not None else "–"
    return f"{text} <small>({bytes_text(formula)})</small>" if formula is not None else text


def _event_table(feed: Feed) -> str:
    if not feed.events:
        return ""
    start = feed.events[0].time
    rows = [
        [escape(event.kind), f"{event.step:,}", seconds_text(max(0.0, event.time - start)), escape(event.text)]
        for event in feed.events[-200:]
    ]
    return _table("Events", ["event", "step", "after", "what happened"], rows)


def _proof(feed: Feed) -> str:
    """Return the proof of the first batch."""
    try:
        found = read_proof(feed.folder.path)
    except RunFolderError as error:
        return f'<h2>Proof of the first batch</h2><p class="card">{escape(str(error))}</p>'
    if found is None:
        return ""
    return f'<h2>Proof of the first batch</h2><div class="card scroll">{found._repr_html_()}</div>'


def _attention(feed: Feed) -> str:
    """Return what queries see in block-sparse attention. For the built-in GPT also whether its layers are enough."""
    config, attention = feed.folder.config, feed.folder.config.model.attention
    if attention.kind == "dense":
        return ""
    trained = next((event.details.get("parameters") for event in feed.events if event.kind == "started"), None)
    layers = config.model.layers if trained == parameter_count(config.model) else None
    try:
        view = describe(attention, config.data.sequence_length, layers=layers, causal=not attention.both_ways)
        return f'<h2>What a query sees</h2><div class="card">{view.html()}</div>'
    except ValueError:  # A custom mask may fit only the shorter sequences of a user's loader.
        return ""


def _configuration(feed: Feed) -> str:
    text = escape(feed.folder.config.to_yaml())
    return f'<h2>Configuration</h2><details class="card"><summary>all fields</summary><pre>{text}</pre></details>'
