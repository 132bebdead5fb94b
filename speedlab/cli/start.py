"""`speedlab start`: engines that stay, for notebooks, scripts and the pages of a Jupyter server."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from speedlab.cluster import Cluster
from speedlab.cluster.home import running_clusters
from speedlab.cluster.host_specs import of_words
from speedlab.config.cli_options import read_options
from speedlab.display.formatting import seconds_text


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """Start a cluster and leave it running: notebooks find it with speedlab.Cluster.attach(), `speedlab stop` ends
    it."""

    cluster: Annotated[str, tyro.conf.Positional] = "default"
    """Name of the cluster."""
    engines: int | None = None
    """Number of engines; when left out one per GPU, else 4 on CPU cores."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """On what engines are started."""
    timeout_seconds: float | None = None
    """How long a collective waits for a rank that does not come; 1,800 when left out."""
    hosts: str | None = None
    """Over SSH, on these hosts, with so many engines each: gpu-1:8,gpu-2:8."""
    slurm: str | None = None
    """In a job of Slurm: nodes=4,gpus_per_node=8,partition=a100,time=8:00:00."""
    mpi: str | None = None
    """Under mpiexec, on the hosts of this host file."""


def start(argv: list[str]) -> int:
    """Start a cluster; returns when its engines are ready. Ctrl-C gives the start up, and leaves nothing of it."""
    options = read_options(StartOptions, argv, "speedlab start", config=(tyro.conf.FlagCreatePairsOff,))
    ran = any(state.name == options.cluster for state in running_clusters())
    began = time.monotonic()
    there = of_words(options.hosts, options.slurm, options.mpi)
    cluster = Cluster(
        options.engines,
        name=options.cluster,
        device=options.device,
        timeout_seconds=options.timeout_seconds,
        **there,
    )
    did = "was running" if ran else f"ready after {seconds_text(time.monotonic() - began)}"
    print(f"cluster {options.cluster}: {cluster.size} engine{'s' if cluster.size != 1 else ''}, {did}")
    return 0
