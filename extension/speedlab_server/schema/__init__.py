"""Messages between the server and its pages: each is defined once, in a file per kind.

Each answer is one JSON object with `type` and `version`. New fields have defaults, and unknown fields are ignored, so
that `VERSION` changes only when the meaning of existing fields changes. `python -m speedlab_server.schema.typescript`
writes the same messages as TypeScript types.

NaN and infinite numbers (such as a loss) are null. Times are seconds since 1970, durations are in seconds, sizes in
bytes. All text is plain text, also from other machines: a page must never use it as markup.
"""

from __future__ import annotations

from speedlab.telemetry.history import SMOOTHING, SMOOTHINGS
from speedlab.telemetry.records import CATEGORIES, PLACES
from speedlab_server.schema.base import VERSION, Message, Notebook, Part, Problem
from speedlab_server.schema.clusters import (
    CLUSTER_WORDS,
    Cluster,
    ClusterKind,
    Clusters,
    ClusterSummary,
    ClusterWordGiven,
    Device,
    Places,
    Rank,
    RankMemory,
    Start,
    StartPlace,
)
from speedlab_server.schema.figure_drawing import (
    BarsPart,
    Changes,
    Compared,
    ComparedPart,
    ComparedRow,
    ComparedRun,
    Comparison,
    Draw,
    ExtendPart,
    Figure,
    FigurePart,
    HeadLine,
    HeadPart,
    Keyframe,
    MarksPart,
    OwnDrawing,
    Segment,
)
from speedlab_server.schema.live import (
    PARTS,
    Output,
    OutputNews,
    RankLines,
    RunNews,
    Subscribe,
    Tick,
    Watch,
    WatchOutput,
)
from speedlab_server.schema.runs import (
    COLUMNS,
    PAGE_WORDS,
    Events,
    Records,
    Run,
    RunEvent,
    RunKind,
    Runs,
    RunSummary,
    TensorRow,
    Tensors,
    Word,
    WordGiven,
)

__all__ = [
    "ANSWERS",
    "CLUSTER_WORDS",
    "COLUMNS",
    "CONSTANTS",
    "PAGE_WORDS",
    "PARTS",
    "QUESTIONS",
    "VERSION",
    "BarsPart",
    "Changes",
    "Cluster",
    "ClusterKind",
    "ClusterSummary",
    "ClusterWordGiven",
    "Clusters",
    "Compared",
    "ComparedPart",
    "ComparedRow",
    "ComparedRun",
    "Comparison",
    "Device",
    "Draw",
    "Events",
    "ExtendPart",
    "Figure",
    "FigurePart",
    "HeadLine",
    "HeadPart",
    "Keyframe",
    "MarksPart",
    "Message",
    "Notebook",
    "Output",
    "OutputNews",
    "OwnDrawing",
    "Part",
    "Places",
    "Problem",
    "Rank",
    "RankLines",
    "RankMemory",
    "Records",
    "Run",
    "RunEvent",
    "RunKind",
    "RunNews",
    "RunSummary",
    "Runs",
    "Segment",
    "Start",
    "StartPlace",
    "Subscribe",
    "TensorRow",
    "Tensors",
    "Tick",
    "Watch",
    "WatchOutput",
    "Word",
    "WordGiven",
]

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
"""Constants that pages need, by name."""

ANSWERS = (
    *(Problem, Clusters, Cluster, Runs, Run, Records, Events, Tensors, Output, Notebook, WordGiven, ClusterWordGiven),
    *(Places, Tick, Keyframe, Comparison, Changes, OwnDrawing),
)
QUESTIONS = (Word, Start, Subscribe, Draw, Segment)
