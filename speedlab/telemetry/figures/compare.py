"""Several runs side by side: how each stands now, figures on the same axes, and the settings in which they differ.

A run has a number, which stands before its name wherever it is drawn, and a colour: a curve, its held-out losses and
the marks of its events are of `legendgroup` or `name` "0", "1", …, by which a page hides a run or gives it the colour
of its theme. Bars stand in the order of the runs, one place for each, also where it has nothing yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

from speedlab.config import RunConfig
from speedlab.display.figure_style import (
    LABELS,
    PHASE_COLOURS,
    Figure,
    bar_marker,
    base_layout,
    curve,
    float32,
    legend_beside,
)
from speedlab.display.formatting import Table, byte_unit, bytes_text, count_text
from speedlab.telemetry.figures.markers import STATE_MARKS, event_marks
from speedlab.telemetry.figures.steps import RECENT_STEPS
from speedlab.telemetry.history import History, bucket_last, bucket_mean, stride, total_bytes
from speedlab.telemetry.records import CATEGORIES, PHASES, RESTING, Event
from speedlab.telemetry.run_folder import Status
from speedlab.telemetry.run_shape import present_config

COLOURS = (
    ("#332288", "#a99bff"),
    ("#b3366b", "#ff9cb8"),
    ("#117733", "#63d08a"),
    ("#0069a8", "#7cc7f2"),
    ("#8a5a00", "#e3bf5a"),
    ("#8b2fa8", "#e2a0f5"),
    ("#b23c00", "#ff9a66"),
    ("#4d5660", "#c3cad2"),
)
"""Of runs, on light and on dark: text in them has a contrast of 4.5:1."""

MOST_COMPARED = len(COLOURS)

_POINTS = 300
_MOST_MARKS = 12
"""Events of a run that are marked: of several runs there are several times as many."""
_MARK_PIXELS = 11
_NAME_LETTERS = 28
_BAR_LETTERS, _FEW = 10, 4
"""Of a name below a bar, and so many bars for which there is room for names."""
_OWN = ("name", "folder")
"""Settings in which any two runs differ."""

Points = tuple[np.ndarray, np.ndarray]
"""(steps, values), float32."""

_NONE: Points = float32([], [])


@dataclass(frozen=True, kw_only=True)
class RunStanding:
    """How one run stands now."""

    name: str
    status: Status = field(default_factory=Status)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Every setting that it has now, by its path, as text."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What it has come to, as text."""
    loss: Points = _NONE
    heldout: Points = _NONE
    speed: Points = _NONE
    """Tokens a second."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Category -> bytes, of the rank that holds most."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Phase, or other -> seconds of a step, mean of the last steps of the lowest rank."""
    events: Sequence[Event] = ()
    problem: str = ""
    """Why it cannot be read; what is here was read before."""


def look_at(name: str, history: History, status: Status, config: RunConfig) -> RunStanding:
    """`config`: with which the run began; what events have changed of it is put in."""
    lead = history.lead
    kept = {"size": stride(lead.length, _POINTS), "closed": status.state in RESTING}
    steps = bucket_last(lead.column("step"), **kept)
    heldout = history.heldout[:: stride(len(history.heldout), _POINTS)]
    fullest = max(history.latest.values(), key=lambda record: total_bytes(record.ledger), default=None)
    engines = len(status.rank_pids) or len(history.latest)
    held = {} if fullest is None else {name: getattr(fullest.ledger, name) for name in CATEGORIES}
    return RunStanding(
        name=name,
        status=status,
        settings=settings_of(present_config(config, history.events, engines)),
        facts=_facts(history, status, engines, sum(held.values())),
        loss=float32(steps, bucket_last(lead.smoothed, **kept)),
        heldout=float32([step for step, _ in heldout], [loss for _, loss in heldout]),
        speed=float32(steps, bucket_mean(lead.column("tokens_per_second"), **kept)),
        held=held,
        phases=_phases(history),
        events=history.events,
    )


def settings_of(config: RunConfig) -> dict[str, str]:
    """Every setting by its path ('zero.stage'), as text; but for what names the run."""
    return {path: text for path, text in _flat(json.loads(config.to_json()), "") if path not in _OWN}


def _flat(values: Mapping[str, Any], before: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", _setting(value)


def _setting(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_setting, value))
    return f"{value:,}" if isinstance(value, int) else str(value)


def _facts(history: History, status: Status, engines: int, held: int) -> dict[str, str]:
    lead = history.lead
    step = int(lead.column("step")[-1]) if lead.length else status.step
    facts = {"step": f"{step:,} of {status.steps:,}" if status.steps else f"{step:,}"}
    if lead.length:
        facts["loss"] = f"{lead.smoothed[-1]:.4f}"
        if history.heldout:
            facts["held-out loss"] = f"{history.heldout[-1][1]:.4f}"
        facts["tokens/s"] = count_text(float(np.median(lead.column("tokens_per_second")[-RECENT_STEPS:])))
        facts["memory of the fullest rank"] = bytes_text(held)
    return facts | {"engines": str(engines)}


def _phases(history: History) -> dict[str, float]:
    lead = history.lead
    if not lead.length:
        return {}
    seconds = {name: float(lead.column(name)[-RECENT_STEPS:].mean()) for name in ("seconds", *PHASES)}
    whole = seconds.pop("seconds")
    return seconds | {"other": max(0.0, whole - sum(seconds.values()))}


# ---- tables ----------------------------------------------------------------------------------------------------------


class RunsSideBySide(Table):
    """Rows of a name and of what it is in each run; columns are the runs."""

    def __init__(self, rows: Iterable[dict[str, Any]], labels: Sequence[str], notes: tuple[str, ...] = ()) -> None:
        super().__init__(rows)
        self._labels, self.notes = labels, notes

    def head(self) -> list[str]:
        return ["", *self._labels]

    def cells(self) -> list[tuple[str, ...]]:
        return [(row["name"], *row["values"]) for row in self]


def facts_table(looks: Sequence[RunStanding]) -> RunsSideBySide:
    """What each has come to: step, loss, speed, memory."""
    names = dict.fromkeys(name for look in looks for name in look.facts)
    return RunsSideBySide(_rows(names, [look.facts for look in looks]), labels(looks))


def settings_table(looks: Sequence[RunStanding]) -> RunsSideBySide:
    """The settings in which they differ, and none else; what cannot be read differs in nothing."""
    known = [look.settings for look in looks if look.settings]
    names = list(dict.fromkeys(name for settings in known for name in settings))
    differing = [name for name in names if len({settings.get(name) for settings in known}) > 1]
    same = len(names) - len(differing)
    note = f"{same} other settings are the same" if differing else f"all {same} settings are the same"
    return RunsSideBySide(_rows(differing, [look.settings for look in looks]), labels(looks), (note,) if names else ())


def _rows(names: Iterable[str], columns: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    return [{"name": name, "values": [column.get(name, "") for column in columns]} for name in names]


def labels(looks: Sequence[RunStanding]) -> list[str]:
    """'1 · name' of each; long names are cut."""
    return [f"{number} · {_short(look.name)}" for number, look in enumerate(looks, 1)]


def _short(name: str, letters: int = _NAME_LETTERS) -> str:
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def told(looks: Sequence[RunStanding]) -> dict[str, Any]:
    """What stands beside the figures, as `speedlab_server.schema.Compared` has it."""
    settings = settings_table(looks)
    return {
        "runs": [
            {
                "name": look.name,
                "colours": list(COLOURS[number]),
                "state": str(look.status.state),
                "mark": STATE_MARKS[look.status.state],
                "problem": look.problem or look.status.unread,
                "text": look.status.text,
            }
            for number, look in enumerate(looks)
        ],
        "facts": list(facts_table(looks)),
        "settings": list(settings),
        "note": "; ".join(settings.notes),
    }


# ---- figures ---------------------------------------------------------------------------------------------------------

OVER_STEPS = ("loss", "throughput")
"""Those that grow at their end."""


def compared_figures(looks: Sequence[RunStanding]) -> dict[str, Figure]:
    """By name, in the order in which they are laid out."""
    speeds = [_curve(number, looks, look.speed, "%{y:,.0f} tokens/s") for number, look in enumerate(looks)]
    throughput = _over_steps(looks, speeds, "throughput", "tokens/s")
    throughput["layout"]["yaxis"] |= {"rangemode": "tozero", "tickformat": "~s"}
    return {"loss": _loss(looks), "throughput": throughput, "memory": _memory(looks), "anatomy": _anatomy(looks)}


def _loss(looks: Sequence[RunStanding]) -> Figure:
    data = [_curve(number, looks, look.loss, "%{y:.4f}") for number, look in enumerate(looks)]
    for number, look in enumerate(looks):
        marks = _curve(number, looks, look.heldout, "held-out %{y:.4f}")
        marker = {"symbol": "diamond-open", "size": 8, "color": COLOURS[number][0]}
        data.append(marks | {"mode": "markers", "marker": marker, "showlegend": False})
    return _over_steps(looks, data, "loss, smoothed; of held-out text ◇", "loss")


def _curve(number: int, looks: Sequence[RunStanding], points: Points, hover: str) -> dict[str, Any]:
    name = escape(labels(looks)[number])
    # Beyond four runs also in strokes: so many colours are hard to keep apart.
    trace = curve(name, points, hover, color=COLOURS[number][0], width=2, dash="solid" if number < 4 else "dash")
    # In a template a % would begin one of plotly's own fields.
    return trace | {"legendgroup": str(number), "hovertemplate": f"{name.replace('%', '&#37;')} {hover}<extra></extra>"}


def _over_steps(looks: Sequence[RunStanding], data: list[dict[str, Any]], title: str, unit: str) -> Figure:
    layout = base_layout(title, unit)
    layout["xaxis"] |= {"title": {"text": "step", "standoff": 4}, "rangemode": "tozero"}
    layout["margin"] |= {"t": layout["margin"]["t"] + _MARK_PIXELS * (len(looks) - 1)}
    for number, look in enumerate(looks):
        colour, marks = COLOURS[number][0], event_marks(look.events)
        line = {"color": colour, "width": 1, "dash": "dot"}
        layout["shapes"] += [shape | {"line": line, "name": str(number)} for shape in marks["shapes"][-_MOST_MARKS:]]
        # Each run's in a line of its own above the curves: they may all end at the same step.
        layout["annotations"] += [
            note
            | {"name": str(number), "yshift": _MARK_PIXELS * (len(looks) - 1 - number)}
            | {"font": {"size": 11, "color": colour}}
            | {"hovertext": f"{escape(labels(looks)[number])}: {note['hovertext']}"}
            for note in marks["annotations"][-_MOST_MARKS:]
        ]
    return {"data": data, "layout": layout}


def _memory(looks: Sequence[RunStanding]) -> Figure:
    unit, size = byte_unit(max((sum(look.held.values()) for look in looks), default=0))
    shown = [category for category in CATEGORIES if any(look.held.get(category) for look in looks)]
    data = [
        {
            "name": LABELS[category],
            "y": [look.held.get(category, 0) / size for look in looks],
            "marker": bar_marker(category),
            "hovertemplate": f"%{{text}}<br>{LABELS[category]} %{{y:.4~r}} {unit}<extra></extra>",
        }
        for category in shown
    ]
    return _bars(looks, data, "memory, the rank that holds most", unit, "relative")


def _anatomy(looks: Sequence[RunStanding]) -> Figure:
    shown = [phase for phase in (*PHASES, "other") if any(look.phases.get(phase) for look in looks)]
    data = [
        {
            "name": phase,
            "y": [1000 * look.phases.get(phase, 0.0) for look in looks],
            "marker": {"color": PHASE_COLOURS[phase], "line": {"width": 0}},
            "hovertemplate": f"%{{text}}<br>{phase} %{{y:.2f}} ms<extra></extra>",
        }
        for phase in shown
    ]
    return _bars(looks, data, f"anatomy of a step, mean of the last {RECENT_STEPS}", "ms", "stack")


def _bars(looks: Sequence[RunStanding], data: list[dict[str, Any]], title: str, unit: str, mode: str) -> Figure:
    many = len(looks) > _FEW
    names = [
        str(number) if many else f"{number} · {escape(_short(look.name, _BAR_LETTERS))}"
        for number, look in enumerate(looks, 1)
    ]
    whole = {"text": list(map(escape, labels(looks))), "textposition": "none"}
    layout = base_layout(title, unit) | {"barmode": mode, "bargap": 0.4, "hovermode": "closest"}
    legend_beside(layout)
    layout["xaxis"] |= {"type": "category", "showgrid": False}
    return {
        "data": [
            {"type": "bar", "x": names, **whole, **trace, "y": np.array(trace["y"], dtype=np.float32)} for trace in data
        ],
        "layout": layout,
    }
