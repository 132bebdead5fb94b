"""Clusters: engines on devices, results and errors by rank, and handles to runs. Never imports torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster, EngineStatus
    from speedlab.cluster.compare_runs import compare
    from speedlab.cluster.errors import ClusterError, RankError, RemoteFailure
    from speedlab.cluster.reattach import attach
    from speedlab.cluster.results import RankResults
    from speedlab.cluster.run import Run

__all__ = [
    "Cluster",
    "ClusterError",
    "EngineStatus",
    "RankError",
    "RankResults",
    "RemoteFailure",
    "Run",
    "attach",
    "compare",
]

_HOMES = {
    "Cluster": "cluster",
    "EngineStatus": "cluster",
    "ClusterError": "errors",
    "RankError": "errors",
    "RemoteFailure": "errors",
    "RankResults": "results",
    "Run": "run",
    "attach": "reattach",
    "compare": "compare_runs",
}
"""Module of each name, imported at its first use, so that an engine does not import the kernel's side."""


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
