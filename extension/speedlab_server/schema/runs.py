"""Messages about runs: their state, records and events, the tensors of a rank, and the commands for runs."""

from __future__ import annotations

from typing import Any, Literal

from speedlab.telemetry.records import PHASES
from speedlab.telemetry.run_folder import CONTROL_WORDS
from speedlab_server.schema.base import Message, Part
from speedlab_server.schema.clusters import RankMemory

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
"""Columns of Records. The phases are in seconds per step."""

PAGE_WORDS = tuple(word for word in CONTROL_WORDS if word not in ("prove", "live"))
"""Commands that a page may send: those without code."""

RunKind = Literal["starting", "running", "paused", "finished", "stopped", "failed", "damaged"]


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
    """Id of the cluster whose engines hold the run; empty if they are gone."""
    engines: int = 0
    updated: float = 0.0
    text: str = ""
    """The run's own text about its state."""
    problem: str = ""
    """What could not be read, and what to do."""


class Runs(Message, kw_only=True):
    """The runs of this person, the newest first."""

    runs: list[RunSummary]


class Run(Message, kw_only=True):
    """One run."""

    run: RunSummary
    ranks: list[int]
    """Ranks with records."""
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
    """(step, held-out loss): all, or evenly chosen ones if there are very many."""


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
    """parameter, gradient, master, moments, or an optimizer's own name."""
    shape: str
    """Of the rank's own tensor, and of the whole parameter if it is sharded."""
    here: str
    """Which of its elements are on this rank."""
    owner: str
    form: str
    """The dtype or format, and which ranks hold it."""
    bytes: int


class Tensors(Message, kw_only=True):
    """The tensors in a segment of the memory bars: what `rank` holds of `category` at `place`, the largest first."""

    rank: int
    category: str
    place: str
    step: int
    """The step of the measured ledger; -1 if there is none yet."""
    measured_bytes: int | None
    """Of the whole segment."""
    tensor_bytes: int
    """Sum of all its tensors."""
    count: int
    """Number of all its tensors; `rows` has the largest if there are very many."""
    rows: list[TensorRow]
    text: str
    """What the tensors do not explain, or why there are none."""


class Word(Part, kw_only=True):
    """What a page asks of a run. Numbers and texts in `arguments` are those of the run's own methods."""

    word: str
    arguments: dict[str, Any] = {}


class WordGiven(Message, kw_only=True):
    """A control word is on its way; the event whose `command` is `number` answers it."""

    run: str
    word: str
    number: int
