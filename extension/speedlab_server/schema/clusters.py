"""Messages about clusters and their ranks, and the commands for clusters."""

from __future__ import annotations

from typing import Literal

from speedlab_server.schema.base import Message, Part

CLUSTER_WORDS = ("cancel", "stop", "remove")
"""Commands for clusters: cancel a start, stop a running cluster, remove the files of an ended one."""

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
    """What a start waits for (such as a place in a scheduler's queue), why it failed, or what to do about a damaged or
    ended cluster.
    """


class Clusters(Message, kw_only=True):
    """Every cluster of this person."""

    clusters: list[ClusterSummary]


class Device(Part, kw_only=True):
    """Where a rank runs."""

    kind: str
    name: str
    capacity_bytes: int
    free_bytes: int
    """At the start of the cluster."""
    cores: int = 0
    """CPU cores that the rank is bound to."""


class Rank(Part, kw_only=True):
    """A rank of a cluster, as it is now."""

    rank: int
    state: str
    """idle, busy, frozen, dead; unknown if the supervisor does not answer."""
    pid: int
    rss_bytes: int
    host: str = ""
    device: Device | None = None
    cpu_share: float | None = None
    """CPU time of the process since the previous request, as a share of its cores. Null at the first request, or if the
    supervisor does not measure it.
    """
    gpu_share: float | None = None
    """Share of the last moments (0 to 1) in which the GPU computed; null if there is no GPU or no measurement."""


class RankMemory(Part, kw_only=True):
    """Bytes of a rank at the peak of its last step, by place (PLACES) and category (CATEGORIES)."""

    rank: int
    step: int
    held: list[list[int]]
    capacity: list[int]
    """By place; 0 if unknown."""


class Cluster(Message, kw_only=True):
    """One cluster."""

    cluster: ClusterSummary
    ranks: list[Rank] = []
    memory: list[RankMemory] = []
    """Of its newest run."""
    runs: list[str] = []
    """Ids of its runs, the newest first."""
    problem: str = ""
    """Why the state of the ranks is unknown."""


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
    """Null for the default: one per GPU, else as many on CPU cores as in a notebook."""
    hosts: str = ""
    """Hosts as in the panel's field: "" for this machine, 'gpu-1:8, gpu-2:8', 'slurm nodes=4, gpus_per_node=8', 'mpi
    HOSTFILE'.
    """
