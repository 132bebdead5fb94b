"""The runs of a cluster, as a handle of it asks the supervisor for them."""

from __future__ import annotations

import contextlib
import secrets
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import speedlab.cluster.processes as processes
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.supervisor import messages as m

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster


_LET_GO_SECONDS = 10.0


class RunsOf:
    """The runs of a cluster, by their folders."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = weakref.ref(cluster)

    def begin(self, folder: Path) -> None:
        """Let the ranks begin with a new run. Raises ClusterError while another one is under way."""
        self._ask(m.Begin(folder=str(folder)))

    def post(self, folder: Path, word: str, arguments: dict[str, Any]) -> int:
        """Give a control word to a run; returns its number. Raises ClusterError when an engine is dead."""
        return self._ask(m.Post(folder=str(folder), word=word, arguments=arguments, key=secrets.token_hex(8)))

    def attend(self, folder: Path) -> None:
        """Look whether words wait for a run that nobody works on."""
        self._ask(m.Attend(folder=str(folder)))

    def standing(self, folder: Path) -> m.Standing:
        """How a run stands with its ranks."""
        return self._ask(m.AskStanding(folder=str(folder)))

    def interrupt(self, folder: Path, seconds: float = 2.0) -> list[int]:
        """Interrupt what the ranks do for this run, and no more; returns the ranks that are idle then."""
        return self._ask(m.Interrupt(folder=str(folder), seconds=seconds))

    @contextlib.contextmanager
    def held(self, folder: Path, seconds: float = 10.0) -> Iterator[None]:
        """Nobody advances the run meanwhile; words wait. The run has to rest; raises ClusterError when it is still
        worked on after `seconds`."""
        key = secrets.token_hex(8)
        try:
            self._ask(m.Hold(folder=str(folder), seconds=seconds, key=key))
            yield
        finally:
            # Also when somebody interrupts just here: words would wait as long as this process lives. The hold goes
            # with the connection where nobody answers.
            with contextlib.suppress(TimeoutError, ClusterError):
                processes.uninterrupted(
                    lambda: self._ask(m.LetGo(folder=str(folder), key=key), seconds=_LET_GO_SECONDS)
                )

    def _ask(self, question: m.Question, *, seconds: float | None = None) -> Any:
        cluster = self._cluster()
        assert cluster is not None, "whoever asks of a run holds its cluster"
        return cluster._ask(question, seconds=seconds)
