"""Post-mortem session of a rank, for `Cluster.debug` and `%speedlab debug`."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING

import speedlab.cluster.debug.rank_debugger as debugging
from speedlab.cluster.debug.connection import DebugServer
from speedlab.cluster.errors import DIED, ClusterError, RankError

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster

_SERVE_SECONDS = 0.02


def debug(cluster: Cluster, rank: int, ask: Callable[[str], str] | None = None) -> None:
    """Open a post-mortem of the last exception of `rank`, with pdb's commands; return at `q` or an interrupt.

    Args:
        cluster: Cluster of the rank.
        rank: The rank.
        ask: ask(prompt) returns a command; None for `input`.

    Raises:
        ClusterError: If the rank does not exist, is dead, is busy, or keeps no exception.
    """
    _refuse(cluster, rank)
    name = secrets.token_hex(8)
    with DebugServer(cluster.directory, name, ask=ask) as door:
        results = cluster.submit(debugging.post_mortem, name, ranks=[rank])
        while not results.wait(_SERVE_SECONDS):
            try:
                door.serve()
            except KeyboardInterrupt:
                door.close()
                results.interrupt()
                raise
        door.finish()
    try:
        (found,) = results.result()
    except RankError as error:
        failure = error.by_rank[rank]
        raise error if failure.kind == DIED else ClusterError(failure.message) from None
    if not found:
        raise ClusterError(
            f"rank {rank} keeps no exception: it has raised none, or only followed another rank's failure, or has done "
            "something since, which frees what it kept. Let it fail again; in a cell of %%ranks --live --wait, "
            "breakpoint() stops before that"
        )


def _refuse(cluster: Cluster, rank: int) -> None:
    states = {status.rank: status.state for status in cluster.status()}
    if states.get(rank) in ("busy", "frozen"):
        doing = "works on something" if states[rank] == "busy" else "is suspended"
        raise ClusterError(
            f"rank {rank} {doing}, and a post-mortem needs it idle: run.pause().wait(), or wait for its cell. While "
            "a run trains, breakpoint() in a cell of %%ranks --live --wait stops between two steps"
        )
