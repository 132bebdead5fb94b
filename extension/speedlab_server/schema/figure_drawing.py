"""Messages about figures: how a page wants them, whole figures, and changes."""

from __future__ import annotations

from typing import Any

from speedlab_server.schema.base import Message, Part


class Draw(Message, kw_only=True):
    """From a page: how it wants a run to be drawn from now on. Hidden, it is not watching."""

    watching: bool = True
    view: str = ""
    """Which of several views of one widget sends the message."""
    keyframe: bool = False
    """Whether the page has missed a message and needs a keyframe."""
    step: int | None = None
    """The step of the pipeline plot; null for the newest."""
    smoothing: float | None = None
    """One of SMOOTHINGS: the weight of the past in smoothed curves; null for the default."""


class Segment(Message, kw_only=True):
    """From a page to a kernel, as it asks a server by `runs/<id>/tensors`: what is in a segment of the memory bars."""

    rank: int
    category: str
    place: str


class Figure(Part, kw_only=True):
    """A figure of plotly's, but that arrays are {"f32": number of a buffer}."""

    data: list[dict[str, Any]]
    layout: dict[str, Any]


class HeadLine(Part, kw_only=True):
    """What stands above the figures."""

    text: str
    state: str
    mark: str
    note: str


class ComparedRun(Part, kw_only=True):
    """A run among others; its number, from 0 on, is its place in the list."""

    name: str
    colours: list[str]
    """On light and on dark backgrounds."""
    state: str
    mark: str
    text: str = ""
    """The run's own text about its state."""
    problem: str = ""
    """Why the run cannot be read now; the other fields are from before."""


class ComparedRow(Part, kw_only=True):
    """Something that has a value in each run; empty in one that has none."""

    name: str
    values: list[str]


class Compared(Part, kw_only=True):
    """What stands beside the figures: the runs, what each has come to, the settings in which they differ."""

    runs: list[ComparedRun]
    facts: list[ComparedRow]
    settings: list[ComparedRow]
    note: str
    """How many settings are the same."""


class ComparedPart(Compared, kw_only=True, tag_field="part", tag="compared"):
    """The same, in the place of what was there."""


class FigurePart(Part, kw_only=True, tag_field="part", tag="figure"):
    """A figure is drawn anew."""

    figure: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]


class ExtendPart(Part, kw_only=True, tag_field="part", tag="extend"):
    """Curves grow: for each of `traces` so many `points`, in the buffer first their x and then their y."""

    figure: str
    traces: list[int]
    points: list[int]
    buffer: int


class BarsPart(Part, kw_only=True, tag_field="part", tag="bars"):
    """Heights of all bars, one trace after another, and the words of the annotations."""

    figure: str
    notes: list[str]
    buffer: int


class MarksPart(Part, kw_only=True, tag_field="part", tag="marks"):
    """Events, on every axis of steps."""

    shapes: list[dict[str, Any]]
    annotations: list[dict[str, Any]]


class HeadPart(HeadLine, kw_only=True, tag_field="part", tag="head"):
    """The line above the figures."""


class Keyframe(Message, kw_only=True):
    """All figures of a run. `states`: whether to begin with the model states alone; null while nothing is known."""

    seq: int
    figures: dict[str, Figure]
    head: HeadLine
    states: bool | None
    buffers: list[int] = []
    """Bytes of each buffer, if the buffers follow in the same frame."""


class Comparison(Message, kw_only=True):
    """All figures of several runs. Curves and marks of a run bear its number, as `legendgroup` or `name`."""

    seq: int
    figures: dict[str, Figure]
    compared: Compared
    buffers: list[int] = []


class Changes(Message, kw_only=True):
    """What is new since the Keyframe, Comparison or Changes whose `seq` is one less."""

    seq: int
    parts: list[FigurePart | ExtendPart | BarsPart | MarksPart | HeadPart | ComparedPart]
    buffers: list[int] = []


class OwnDrawing(Message, kw_only=True):
    """From a kernel, of a widget with several views: what is for the one alone that smooths by a share of its own. From
    then on that view takes no other drawing."""

    view: str
    drawn: Keyframe | Changes
