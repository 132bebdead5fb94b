"""Clusters, their ranks, and what a page asks of them."""

from __future__ import annotations

from typing import Literal

from speedlab_server.schema.base import Message, Part

CLUSTER_WORDS = ("cancel", "stop", "remove")
"""What a page may ask of a cluster: of one that is being started, of one that runs, and of what is left of one."""

ClusterKind = Literal["running", "starting", "ended", "elsewhere", "damaged", "failed"]


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
