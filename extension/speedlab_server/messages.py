"""What the server and its pages say to each other: every message, defined once, and the version of all of them.

Each answer is one JSON object with `type` and `version`. Fields that a later version adds have defaults, and unknown
ones are passed over, so that `VERSION` counts up only when the meaning of what is there changes.
`python -m speedlab_server.typescript` writes the same as TypeScript types.

Numbers that are no numbers (a loss that is NaN) are null. Times are seconds since the epoch, durations seconds, bytes
bytes. All text is text, wherever it came from: a page never makes markup of it.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from speedlab.telemetry.folder import CONTROL_WORDS
from speedlab.telemetry.records import CATEGORIES, PHASES, PLACES
from speedlab.telemetry.series import SMOOTHING, SMOOTHINGS

VERSION = 1

COLUMNS = (
    "step",
    "loss_low",
    "loss_high",
    "smoothed_loss",
    "learning_rate",
    "grad_norm",
    "tokens_per_second",
    "flops_per_second",
    "seconds",
    *PHASES,
)
"""Columns of Records; the phases are seconds of a step."""

PARTS = ("status", "records", "events", "memory")
"""What a page may hear of a run."""

CLUSTER_WORDS = ("cancel", "stop", "remove")
"""What a page may ask of a cluster: of one that is being started, of one that runs, and of what is left of one."""

PAGE_WORDS = tuple(word for word in CONTROL_WORDS if word != "live")
"""Control words that a page may give: those that bring no code along."""

CONSTANTS: dict[str, float | tuple[str, ...] | tuple[float, ...]] = {
    "VERSION": VERSION,
    "CATEGORIES": CATEGORIES,
    "PLACES": PLACES,
    "COLUMNS": COLUMNS,
    "SMOOTHING": SMOOTHING,
    "SMOOTHINGS": SMOOTHINGS,
    "CONTROL_WORDS": PAGE_WORDS,
    "CLUSTER_WORDS": CLUSTER_WORDS,
}
"""What pages need of these, by name."""

ClusterKind = Literal["running", "starting", "ended", "elsewhere", "damaged", "failed"]
RunKind = Literal["starting", "running", "paused", "finished", "stopped", "failed", "damaged"]


class Part(msgspec.Struct, kw_only=True):
    """What is inside of messages."""


class Message(msgspec.Struct, kw_only=True, tag_field="type", tag=True):
    """Anything that travels by itself."""

    version: int = VERSION


class Problem(Message, kw_only=True):
    """Why something could not be answered, and what to do."""

    text: str


class ClusterSummary(Part, kw_only=True):
    """A cluster, in a list."""

    id: str
    name: str
    state: ClusterKind
    engines: int = 0
    host: str = ""
    hosts: list[str] = []
    link: str = ""
    started: float = 0.0
    text: str = ""
    """A place in a scheduler's queue and other things a start waits for; why it failed; of a damaged or ended one, what
    to do."""


class Clusters(Message, kw_only=True):
    """Every cluster of this person."""

    clusters: list[ClusterSummary]


class Device(Part, kw_only=True):
    """Where a rank runs."""

    kind: str
    name: str
    capacity_bytes: int
    free_bytes: int
    """When the cluster was started."""
    cores: int = 0
    """CPU cores that the rank is bound to."""


class Rank(Part, kw_only=True):
    """A rank of a cluster, as it is now."""

    rank: int
    state: str
    """idle, busy, frozen, dead; unknown where the supervisor does not answer."""
    pid: int
    rss_bytes: int
    host: str = ""
    device: Device | None = None
    cpu_share: float | None = None
    """CPU time of its process as a share of its cores' since the look before; null at the first look, and where the
    supervisor does not measure it."""
    gpu_share: float | None = None
    """Share of the last moments in which its GPU computed, 0 to 1; null where there is none, or nothing tells it."""


class RankMemory(Part, kw_only=True):
    """Bytes of a rank at the peak of its last step, by place (PLACES) and category (CATEGORIES)."""

    rank: int
    step: int
    held: list[list[int]]
    capacity: list[int]
    """By place; 0 where nobody knows."""


class Cluster(Message, kw_only=True):
    """One cluster."""

    cluster: ClusterSummary
    ranks: list[Rank] = []
    memory: list[RankMemory] = []
    """Of the newest run on it."""
    runs: list[str] = []
    """Ids of the runs it was given, the newest first."""
    problem: str = ""
    """Why the state of its ranks is not known."""


class RunSummary(Part, kw_only=True):
    """A run, in a list."""

    id: str
    name: str
    state: RunKind
    step: int = 0
    steps: int = 0
    loss: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    cluster: str = ""
    """Id of the cluster whose engines hold it; empty where these are gone."""
    engines: int = 0
    updated: float = 0.0
    text: str = ""
    """What the run says of its state."""
    problem: str = ""
    """What could not be read, and what to do."""


class Runs(Message, kw_only=True):
    """The runs of this person, the newest first."""

    runs: list[RunSummary]


class Run(Message, kw_only=True):
    """One run."""

    run: RunSummary
    ranks: list[int]
    """Those that have records."""
    config: dict[str, Any]
    memory: list[RankMemory] = []


class Records(Message, kw_only=True):
    """Step records of a rank in buckets of `stride` steps: a page keeps its first `keep` points and appends these.

    `generation` counts how often steps were computed again; it goes back with the next question, as `stride` and the
    last step do (`after`). Where one does not fit any more, `keep` is 0 and everything comes anew.
    """

    run: str
    rank: int
    generation: int
    stride: int
    keep: int
    columns: dict[str, list[float | None]]
    heldout: list[tuple[int, float | None]] = []
    """(step, held-out loss): all of them, or of very many evenly chosen ones."""


class RunEvent(Part, kw_only=True):
    """Something that happened to a run."""

    kind: str
    step: int
    time: float
    text: str = ""
    command: int | None = None
    details: dict[str, Any] = {}


class Events(Message, kw_only=True):
    """Events of a run: a page keeps its first `keep` ones and appends these; there are `total`."""

    run: str
    keep: int
    total: int
    events: list[RunEvent]


class TensorRow(Part, kw_only=True):
    """A state of a parameter, as far as a rank holds it."""

    name: str
    unit: str
    state: str
    """parameter, gradient, master, moments, and what an optimizer keeps by names of its own."""
    shape: str
    """Of the rank's own tensor, and of the whole where it is cut."""
    here: str
    """Which of its elements are here."""
    owner: str
    form: str
    """As what it is kept, and who holds it."""
    bytes: int


class Tensors(Message, kw_only=True):
    """The tensors in a segment of the memory bars: what `rank` holds of `category` at `place`, the largest first."""

    rank: int
    category: str
    place: str
    step: int
    """Whose ledger was measured; -1 where there is none yet."""
    measured_bytes: int | None
    """Of the whole segment."""
    tensor_bytes: int
    """Of all its tensors."""
    count: int
    """Of all its tensors; of very many, `rows` has the largest."""
    rows: list[TensorRow]
    text: str
    """What the tensors do not explain, or why there are none."""


class RankLines(Part, kw_only=True):
    """What a rank has printed."""

    rank: int
    lines: list[str]
    skipped: bool = False
    """Whether there were more lines before these than are kept, or sent at once."""


class Output(Message, kw_only=True):
    """What ranks have printed. `cursor` goes back as `after` with the next question."""

    ranks: list[RankLines]
    cursor: str


class Notebook(Message, kw_only=True):
    """A notebook that comes with SpeedLab."""

    name: str
    content: dict[str, Any]


class Word(Part, kw_only=True):
    """What a page asks of a run. Numbers and texts in `arguments` are those of the run's own methods."""

    word: str
    arguments: dict[str, Any] = {}


class WordGiven(Message, kw_only=True):
    """A control word is on its way; the event whose `command` is `number` answers it."""

    run: str
    word: str
    number: int


class ClusterWordGiven(Message, kw_only=True):
    """A word was carried out; a start (`word` is "start") goes on, and the list of clusters tells how."""

    cluster: str
    word: str


class StartPlace(Part, kw_only=True):
    """A Python that can start a cluster."""

    id: str
    name: str


class Places(Message, kw_only=True):
    """With what a page can start a cluster, the server's own Python first. `problem`: why with nothing."""

    places: list[StartPlace]
    problem: str = ""


class Start(Part, kw_only=True):
    """A cluster that a page wants, from the server's machine."""

    name: str
    place: str
    """Id of a StartPlace."""
    engines: int | None = None
    """Null: one per GPU, else as many on CPU cores as a notebook gets."""
    hosts: str = ""
    """As a panel's line: "" for this machine, 'gpu-1:8, gpu-2:8', 'slurm nodes=4, gpus_per_node=8', 'mpi HOSTFILE'."""


class Watch(Part, kw_only=True):
    """What a page wants to hear of a run, and what it has of it already (see Records and Events)."""

    id: str
    parts: list[Literal["status", "records", "events", "memory"]]
    generation: int = 0
    stride: int = 0
    after: int = -1
    events_after: int = 0
    points: int = 400


class WatchOutput(Part, kw_only=True):
    """What ranks print: those of a cluster, or of the one that holds a run."""

    kind: Literal["clusters", "runs"]
    id: str
    after: str = ""
    """The cursor of what the page has; without one it begins with the end of what there is. Of output that this page
    watches already it does not count: that goes on where it is, as the page may have more by now than it said."""


class Subscribe(Message, kw_only=True):
    """From a page: what it wants to hear from now on, in the place of what it heard. Hidden, it wants nothing."""

    runs: list[Watch] = []
    outputs: list[WatchOutput] = []
    lists: bool = False
    """Whether it wants the lists of clusters and runs."""


class RunNews(Part, kw_only=True):
    """What is new of a run; null is nothing new."""

    id: str
    status: RunSummary | None = None
    records: Records | None = None
    events: Events | None = None
    memory: list[RankMemory] | None = None
    problem: str | None = None
    """Why there is nothing; empty when there is something again."""


class OutputNews(Part, kw_only=True):
    """What ranks have printed since; null is nothing new."""

    kind: Literal["clusters", "runs"]
    id: str
    output: Output | None = None
    problem: str | None = None
    """Why nothing comes; empty when something does again."""


class Tick(Message, kw_only=True):
    """To a page: all that is new, at most ten times a second."""

    runs: list[RunNews] = []
    outputs: list[OutputNews] = []
    lists_problem: str | None = None
    """Why the lists cannot be read; null is nothing new, empty that they can be read again."""
    all_runs: list[RunSummary] | None = None
    all_clusters: list[ClusterSummary] | None = None


class Draw(Message, kw_only=True):
    """From a page: how it wants a run to be drawn from now on. Hidden, it is not watching."""

    watching: bool = True
    view: str = ""
    """Which of several views of one widget speaks."""
    keyframe: bool = False
    """Whether it has missed something and wants everything anew."""
    step: int | None = None
    """The step whose pipeline is wanted; null takes the newest."""
    smoothing: float | None = None
    """Of SMOOTHINGS: the share of the past in smoothed curves; null takes the usual one."""


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
    """On light, and on dark."""
    state: str
    mark: str
    text: str = ""
    """What the run says of its state."""
    problem: str = ""
    """Why it cannot be read; what is shown was read before."""


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
    """Bytes of each buffer, where they follow in one frame."""


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


ANSWERS = (
    *(Problem, Clusters, Cluster, Runs, Run, Records, Events, Tensors, Output, Notebook, WordGiven, ClusterWordGiven),
    *(Places, Tick, Keyframe, Comparison, Changes, OwnDrawing),
)
QUESTIONS = (Word, Start, Subscribe, Draw, Segment)
