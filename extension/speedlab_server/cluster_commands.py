"""Commands of pages for clusters: start one, cancel a start, stop one, remove an ended one. All of them block.

Each command applies to clusters in certain states. If the state has changed since the page was drawn, the command is
refused with a text: a user who cancels a place in a queue does not mean engines that have just become ready.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import speedlab.cluster.shutdown as ending
import speedlab_server.schema as m
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import ClusterDir, ClusterState
from speedlab.cluster.launch.host_specs import of_line, parse, words_of_line
from speedlab.cluster.launch.placement import MOST_ENGINES
from speedlab_server.clusters import find, summary_of
from speedlab_server.errors import QuestionError, UnknownError

if TYPE_CHECKING:
    from speedlab_server.start_cluster import ClusterLauncher, PythonEnvironment

_FOR: dict[str, tuple[m.ClusterKind, ...]] = {
    "cancel": ("starting",),
    "stop": ("running",),
    "remove": ("ended", "damaged", "failed"),
}
"""Command -> the states to which it applies."""
_INSTEAD: dict[m.ClusterKind, str] = {
    "running": "it runs; stop it instead",
    "starting": "it is being started; cancel that instead",
    "ended": "it has ended; remove what is left of it",
    "damaged": "its file is damaged; remove it",
    "failed": "it did not start; remove it",
    "elsewhere": "its controller is on another host; open Jupyter there",
}


def check(word: m.Word) -> None:
    """Raise QuestionError unless the command is known and has no arguments.

    Args:
        word: The command.
    """
    if word.word not in m.CLUSTER_WORDS:
        raise QuestionError(f"a cluster knows no {word.word[:64]!r}; known: {', '.join(m.CLUSTER_WORDS)}")
    if word.arguments:
        raise QuestionError(f"{word.word} takes nothing, and {min(word.arguments)[:64]!r} was given")


def begin(starts: ClusterLauncher, start: m.Start, place: PythonEnvironment) -> None:
    """Start a cluster in the background. The start itself checks whether its hosts can be reached.

    Args:
        starts: The server's starts.
        start: What to start.
        place: The Python that starts it.

    Raises:
        QuestionError: The number of engines is out of range.
        ClusterError: The name exists or is invalid, or the hosts cannot be parsed.
    """
    if start.engines is not None and not 1 <= start.engines <= MOST_ENGINES:
        raise QuestionError(f"engines is {start.engines}; a page starts 1 to {MOST_ENGINES}, or says nothing")
    id = ClusterDir(start.name).path.name
    state = next((cluster.state for cluster in _found(id, starts)), "ended")
    if state in ("running", "starting"):
        raise ClusterError(f"there is a cluster {start.name!r}: {_INSTEAD[state]}, or give the new one another name")
    there = of_line(start.hosts)
    if there and start.engines is not None:
        raise ClusterError("engines and hosts are both given; hosts say how many each has, as 'gpu-1:8'")
    if "mpi" not in there:  # The start reads its host file.
        parse(**there)
    starts.begin(start.name, start.engines, place, words_of_line(start.hosts))


def give(id: str, word: str, starts: ClusterLauncher) -> None:
    """Execute a command; return when it is done.

    Args:
        id: Id of the cluster.
        word: One of CLUSTER_WORDS.
        starts: The server's starts.

    Raises:
        UnknownError: There is no such cluster.
        ClusterError: The cluster is in another state, or on another host.
        TimeoutError: The supervisor does not answer.
        OSError: Files cannot be deleted.
    """
    cluster = next(iter(_found(id, starts)), None) or summary_of(*find(id))
    if cluster.state not in _FOR[word]:
        raise ClusterError(f"{word}: cluster {cluster.name!r} was not touched: {_INSTEAD[cluster.state]}")
    home = ClusterDir(cluster.name.partition("@")[0])
    if home.path.name != id:
        raise ClusterError(f"{word}: the folder {home.root / id} is another host's; open Jupyter there")
    if word == "stop":
        _, state = find(id)
        if isinstance(state, ClusterState):
            ending.stop(home, state.token)
        return
    if word == "cancel":
        starts.give_up(home.name)
        try:
            ending.cancel_start(home)
            return
        except ending.NotStartingError:  # There is no supervisor yet, or no longer.
            if not starts.knows(home.name):
                raise
    starts.end(home.name)
    ending.remove(home)


def _found(id: str, starts: ClusterLauncher) -> list[m.ClusterSummary]:
    """Return the cluster of this id as the list shows it, in a list; [] if there is none."""
    found = []
    with contextlib.suppress(UnknownError):
        found.append(summary_of(*find(id)))
    return [cluster for cluster in starts.reported(found) if cluster.id == id]
