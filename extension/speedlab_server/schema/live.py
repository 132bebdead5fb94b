"""Messages of the live websocket: subscriptions, news about runs and clusters, and the output of ranks."""

from __future__ import annotations

from typing import Literal

from speedlab_server.schema.base import Message, Part
from speedlab_server.schema.clusters import ClusterSummary, RankMemory
from speedlab_server.schema.runs import Events, Records, RunSummary


class RankLines(Part, kw_only=True):
    """What a rank has printed."""

    rank: int
    lines: list[str]
    skipped: bool = False
    """Whether earlier lines are missing, because they are deleted or too many for one message."""


class Output(Message, kw_only=True):
    """What ranks have printed. `cursor` goes back as `after` with the next question."""

    ranks: list[RankLines]
    cursor: str


PARTS = ("status", "records", "events", "memory")
"""What a page can subscribe to of a run."""


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
    """The cursor of the page's last answer; empty to begin near the end. Ignored for output that this page watches
    already:
    that continues from its position, because the page may have received more since.
    """


class Subscribe(Message, kw_only=True):
    """From a page: what it wants to hear from now on, in the place of what it heard. Hidden, it wants nothing."""

    runs: list[Watch] = []
    outputs: list[WatchOutput] = []
    lists: bool = False
    """Whether to send the lists of clusters and runs."""


class RunNews(Part, kw_only=True):
    """What is new of a run; null is nothing new."""

    id: str
    status: RunSummary | None = None
    records: Records | None = None
    events: Events | None = None
    memory: list[RankMemory] | None = None
    problem: str | None = None
    """Why there is nothing; empty when the run is readable again."""


class OutputNews(Part, kw_only=True):
    """What ranks have printed since; null is nothing new."""

    kind: Literal["clusters", "runs"]
    id: str
    output: Output | None = None
    problem: str | None = None
    """Why there is nothing; empty when the output is readable again."""


class Tick(Message, kw_only=True):
    """To a page: all that is new, at most ten times a second."""

    runs: list[RunNews] = []
    outputs: list[OutputNews] = []
    lists_problem: str | None = None
    """Why the lists cannot be read; null for no change, empty when they are readable again."""
    all_runs: list[RunSummary] | None = None
    all_clusters: list[ClusterSummary] | None = None
