"""Compare several runs: the present state of each, figures on common axes, and the settings that differ.

Each run has a number, shown before its name, and a colour. Its curve, held-out losses and event marks have the
`legendgroup` or `name` "0", "1", …, so that a page can hide a run or use the colour of its theme. Bars are in the
order of the runs. Each run has its place, even if it has no data yet.
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
    legend_alongside,
)
from speedlab.display.formatting import Table, byte_unit, bytes_text, count_text
from speedlab.telemetry.current_config import present_config
from speedlab.telemetry.figures.markers import STATE_MARKS, event_marks
from speedlab.telemetry.figures.steps import RECENT_STEPS
from speedlab.telemetry.history import History, bucket_last, bucket_mean, stride, total_bytes
from speedlab.telemetry.records import CATEGORIES, PHASES, RESTING, Event
from speedlab.telemetry.run_folder import Status

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
"""Colours of the runs, on light and on dark backgrounds: text in them has a contrast of 4.5:1."""

MOST_COMPARED = len(COLOURS)

_POINTS = 300
_MOST_MARKS = 12
"""Maximum number of marked events per run: several runs have several times as many."""
_MARK_PIXELS = 11
_NAME_LETTERS = 28
_BAR_LETTERS, _FEW = 10, 4
"""Letters of a name below a bar, and the maximum number of bars with room for names."""
_OWN = ("name", "folder")
"""Settings in which any two runs differ."""

Points = tuple[np.ndarray, np.ndarray]
"""(steps, values), float32."""

_NONE: Points = float32([], [])


@dataclass(frozen=True, kw_only=True)
class RunStanding:
    """The present state of one run."""

    name: str
    status: Status = field(default_factory=Status)
    settings: Mapping[str, str] = field(default_factory=dict)
    """Path of a setting -> its present value, as text."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Results so far, as text."""
    loss: Points = _NONE
    heldout: Points = _NONE
    speed: Points = _NONE
    """Tokens per second."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Category -> bytes, of the rank that holds the most."""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Phase or 'other' -> seconds per step; mean over the last steps of the lowest rank."""
    events: Sequence[Event] = ()
    problem: str = ""
    """Why the run cannot be read now; the other fields are from before."""


def look_at(name: str, history: History, status: Status, config: RunConfig) -> RunStanding:
    """Return the present state of a run.

    Args:
        name: The run's name.
        history: The run's data.
        status: The run's status.
        config: The run's configuration; later changes are taken from the events.
    """
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
    """Return every setting by its path ('zero.stage') as text, except name and folder.

    Args:
        config: A configuration.
    """
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
    """A table with a row per fact or setting and a column per run."""

    def __init__(self, rows: Iterable[dict[str, Any]], labels: Sequence[str], notes: tuple[str, ...] = ()) -> None:
        super().__init__(rows)
        self._labels, self.notes = labels, notes

    def head(self) -> list[str]:
        """Return the column titles."""
        return ["", *self._labels]

    def cells(self) -> list[tuple[str, ...]]:
        """Return the text of each row's cells."""
        return [(row["name"], *row["values"]) for row in self]


def facts_table(looks: Sequence[RunStanding]) -> RunsSideBySide:
    """Return the results of each run: step, loss, speed, memory.

    Args:
        looks: The present state of each run.
    """
    names = dict.fromkeys(name for look in looks for name in look.facts)
    return RunsSideBySide(_rows(names, [look.facts for look in looks]), labels(looks))


def settings_table(looks: Sequence[RunStanding]) -> RunsSideBySide:
    """Return the settings that differ between the runs. Runs that cannot be read are ignored.

    Args:
        looks: The present state of each run.
    """
    known = [look.settings for look in looks if look.settings]
    names = list(dict.fromkeys(name for settings in known for name in settings))
    differing = [name for name in names if len({settings.get(name) for settings in known}) > 1]
    same = len(names) - len(differing)
    note = f"{same} other settings are the same" if differing else f"all {same} settings are the same"
    return RunsSideBySide(_rows(differing, [look.settings for look in looks]), labels(looks), (note,) if names else ())


def _rows(names: Iterable[str], columns: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    return [{"name": name, "values": [column.get(name, "") for column in columns]} for name in names]


def labels(looks: Sequence[RunStanding]) -> list[str]:
    """Return '1 · name' for each run; long names are truncated.

    Args:
        looks: The present state of each run.
    """
    return [f"{number} · {_short(look.name)}" for number, look in enumerate(looks, 1)]


def _short(name: str, letters: int = _NAME_LETTERS) -> str:
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def reported(looks: Sequence[RunStanding]) -> dict[str, Any]:
    """Return the data next to the figures, in the form of `speedlab_server.schema.Compared`.

    Args:
        looks: The present state of each run.
    """
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
"""Figures whose curves grow at their end."""


def compared_figures(looks: Sequence[RunStanding]) -> dict[str, Figure]:
    """Return the figures by name, in the order of the page.

    Args:
        looks: The present state of each run.
    """
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
    # Dash the curves after the fourth: more colours are hard to distinguish.
    trace = curve(name, points, hover, color=COLOURS[number][0], width=2, dash="solid" if number < 4 else "dash")
    # Escape %: in a hover template it would begin a plotly field.
    return trace | {"legendgroup": str(number), "hovertemplate": f"{name.replace('%', '&#37;')} {hover}<extra></extra>"}


def _over_steps(looks: Sequence[RunStanding], data: list[dict[str, Any]], title: str, unit: str) -> Figure:
    layout = base_layout(title, unit)
    layout["xaxis"] |= {"title": {"text": "step", "standoff": 4}, "rangemode": "tozero"}
    layout["margin"] |= {"t": layout["margin"]["t"] + _MARK_PIXELS * (len(looks) - 1)}
    for number, look in enumerate(looks):
        colour, marks = COLOURS[number][0], event_marks(look.events)
        line = {"color": colour, "width": 1, "dash": "dot"}
        layout["shapes"] += [shape | {"line": line, "name": str(number)} for shape in marks["shapes"][-_MOST_MARKS:]]
        # Put each run's marks in an own line above the curves, because marks of several runs may share a step.
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
    legend_alongside(layout)
    layout["xaxis"] |= {"type": "category", "showgrid": False}
    return {
        "data": [
            {"type": "bar", "x": names, **whole, **trace, "y": np.array(trace["y"], dtype=np.float32)} for trace in data
        ],
        "layout": layout,
    }
