"""What fails on one rank fails on all: ranks that went different ways would wait for each other for ever.

- Work that meets no peer is tried on every rank and its problems are gathered: `agreed`.
- Work with collectives inside may fail on one rank while its peers wait for it. That rank leaves, so that they fail
  too; all meet anew and tell each other what happened: `together`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from speedlab.comm import Group, PeerLost, join, leave
from speedlab.config import ConfigError
from speedlab.engine.checkpoint import CheckpointError

T = TypeVar("T")
Problem = tuple[str, str]
"""Kind and text of an exception."""

_TOLD_ALONE = (ConfigError.__name__, CheckpointError.__name__)
"""Kinds whose text says all that a person wants to know. Either is raised before anything is changed."""


class CommandRefused(ConfigError):  # noqa: N818  # what happened, not what is wrong
    """Something that was asked for and is not done. Raised on all ranks alike, with everything as it was before."""


class RanksDiverged(RuntimeError):  # noqa: N818  # what happened
    """Collective work failed on some rank. All ranks have met anew and raise this alike; its text names the ranks.

    `alike`: every rank had the same problem, of a kind that is found before anything is changed.
    """

    def __init__(self, problems: Mapping[int, Problem], size: int) -> None:
        super().__init__(told(problems, size))
        kinds = {kind for kind, _ in problems.values()}
        self.alike = _same_on_all(problems, size) and kinds <= set(_TOLD_ALONE)


class Reconnectable(Protocol):
    """Connections that can be left and made anew."""

    control: Group

    @property
    def stopping(self) -> bool:
        """Whether this rank was interrupted."""
        ...

    def disconnect(self) -> None: ...

    def reconnect(self) -> None: ...


class ControlGroup:
    """The meeting of ranks of which none has an engine that others will meet again."""

    stopping = False

    def __init__(self, control: Group) -> None:
        self.control = control

    def disconnect(self) -> None:
        self.control.disconnect()
        leave(failed=True)

    def reconnect(self) -> None:
        join()
        self.control.reconnect()


def agreed(control: Group, work: Callable[[], T]) -> T:
    """The result of `work` on this rank, which meets no peer. Collective.

    When it raises on any rank, all raise: Refusal where the user can mend it (ConfigError); else the rank its own
    exception, and the others PeerLost with its rank and cause.
    """
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(work())
    except Exception as raised:  # Whatever it is, the others must hear of it before it goes on its way.
        error = raised
    problems = _problems(control, error)
    if not problems:
        return result[0]
    if any(kind == ConfigError.__name__ for kind, _ in problems.values()):
        raise CommandRefused(told(problems, control.size)) from error
    raise error or PeerLost(told(problems, control.size))


def together(meeting: Reconnectable, work: Callable[[], T]) -> T:
    """The result of `work`, which has collectives inside. Collective.

    When it raises on any rank, all meet anew and raise Parted; a Refusal is raised as it is. A rank that was
    interrupted raises KeyboardInterrupt instead: so were its peers, and who is forced to stop meets nobody.
    """
    try:
        result = work()
        meeting.control.barrier()  # If a peer failed, this rank learns of it here.
        return result
    except CommandRefused:
        raise
    except Exception as raised:
        error = raised
    if meeting.stopping:
        raise KeyboardInterrupt("what all ranks did together was cut off") from error
    meeting.disconnect()
    meeting.reconnect()
    problems = _problems(meeting.control, error)
    causes = {rank: problem for rank, problem in problems.items() if problem[0] != PeerLost.__name__} or problems
    raise RanksDiverged(causes, meeting.control.size) from error


def told(problems: Mapping[int, Problem], size: int) -> str:
    """Problems by rank in words; of one that all of `size` ranks have, without the ranks."""
    said = {rank: text if kind in _TOLD_ALONE else f"{kind}: {text}" for rank, (kind, text) in problems.items()}
    if _same_on_all(problems, size):
        return said[0]
    return "; ".join(f"rank {rank}: {said[rank]}" for rank in sorted(said))


def _same_on_all(problems: Mapping[int, Problem], size: int) -> bool:
    return len(problems) == size and len(set(problems.values())) == 1


def _problems(control: Group, error: Exception | None) -> dict[int, Problem]:
    """Every rank's problem, by rank: the kind and the text of its exception. A kind of ConfigError counts as one."""
    problem: Any = None
    if error is not None:
        kind = ConfigError if isinstance(error, ConfigError) else type(error)
        problem = [kind.__name__, str(error)]
    return {rank: (report[0], report[1]) for rank, report in enumerate(control.collect(problem)) if report}
