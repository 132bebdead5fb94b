"""Turn an error on one rank into an error on all ranks; otherwise the ranks would deadlock.

- `agreed` runs work without collectives on every rank and then gathers the errors.
- `together` runs work with collectives. A rank that fails leaves the world, so that its peers fail, too. Then all ranks
  reconnect and exchange their errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from speedlab.comm import Group, PeerLost, join, leave
from speedlab.config import ConfigError
from speedlab.engine.checkpoint import CheckpointError

T = TypeVar("T")
Problem = tuple[str, str]
"""Class name and text of an exception."""

_REPORTED_ALONE = (ConfigError.__name__, CheckpointError.__name__)
"""Exceptions whose text is enough for the user, without the class name. Both are raised before anything is changed."""


class CommandRefused(ConfigError):  # noqa: N818  # what happened, not what is wrong
    """A command that was refused. All ranks raise the same error, and no state has changed."""


class RanksDiverged(RuntimeError):  # noqa: N818  # what happened
    """Collective work failed on some rank. All ranks have reconnected and raise this error; its text names the ranks.

    Attributes:
        alike: Whether all ranks had the same problem, of a kind that is found before anything is changed.
    """

    def __init__(self, problems: Mapping[int, Problem], size: int) -> None:
        super().__init__(reported(problems, size))
        kinds = {kind for kind, _ in problems.values()}
        self.alike = _same_on_all(problems, size) and kinds <= set(_REPORTED_ALONE)


class Reconnectable(Protocol):
    """Connections that can be closed and opened again."""

    control: Group

    @property
    def stopping(self) -> bool:
        """Whether this rank was interrupted."""
        ...

    def disconnect(self) -> None:
        """Close the connections of this rank, so that waiting peers fail at once."""
        ...

    def reconnect(self) -> None:
        """Open the connections again. Collective."""
        ...


class ControlGroup:
    """Reconnect only the control group, for ranks without an engine to reconnect."""

    stopping = False

    def __init__(self, control: Group) -> None:
        self.control = control

    def disconnect(self) -> None:
        """Close the control group and leave the world."""
        self.control.disconnect()
        leave(failed=True)

    def reconnect(self) -> None:
        """Join the world and open the control group again. Collective."""
        join()
        self.control.reconnect()


def agreed(control: Group, work: Callable[[], T]) -> T:
    """Run `work`, which has no collectives, on every rank and return the result of this rank. Collective.

    Args:
        control: Group of all ranks, which gathers the errors.
        work: Function without arguments and without collectives.

    Returns:
        The result of `work` on this rank.

    Raises:
        CommandRefused: On all ranks, if any rank raised ConfigError, which the user can fix.
        PeerLost: On ranks that succeeded while another rank failed; names that rank and its error.
        Exception: On a rank that failed, its own error.
    """
    result: list[T] = []
    error: Exception | None = None
    try:
        result.append(work())
    except Exception as raised:  # Peers must receive any error before it propagates.
        error = raised
    problems = _problems(control, error)
    if not problems:
        return result[0]
    if any(kind == ConfigError.__name__ for kind, _ in problems.values()):
        raise CommandRefused(reported(problems, control.size)) from error
    # A failed rank raises its own error; the others name the failed ranks.
    raise error or PeerLost(reported(problems, control.size))


def together(meeting: Reconnectable, work: Callable[[], T]) -> T:
    """Run `work`, which has collectives inside, and return the result of this rank. Collective.

    Args:
        meeting: Connections to close and open again if `work` fails.
        work: Function without arguments, which may use collectives.

    Returns:
        The result of `work` on this rank.

    Raises:
        CommandRefused: Passed on unchanged, because all ranks raise it.
        RanksDiverged: On all ranks, after they reconnected, if any rank failed.
        KeyboardInterrupt: If this rank was interrupted. Its peers were interrupted, too, so it does not reconnect.
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
    # PeerLost is only a consequence of another rank's error, so report it only if there is no cause.
    causes = {rank: problem for rank, problem in problems.items() if problem[0] != PeerLost.__name__} or problems
    raise RanksDiverged(causes, meeting.control.size) from error


def reported(problems: Mapping[int, Problem], size: int) -> str:
    """Return one text for the problems of all ranks, without rank numbers if all `size` ranks have the same problem.

    Args:
        problems: Class name and text of the exception, by rank.
        size: Number of ranks.
    """
    said = {rank: text if kind in _REPORTED_ALONE else f"{kind}: {text}" for rank, (kind, text) in problems.items()}
    if _same_on_all(problems, size):
        return said[0]
    return "; ".join(f"rank {rank}: {said[rank]}" for rank in sorted(said))


def _same_on_all(problems: Mapping[int, Problem], size: int) -> bool:
    return len(problems) == size and len(set(problems.values())) == 1


def _problems(control: Group, error: Exception | None) -> dict[int, Problem]:
    """Gather class name and text of the exception of every failed rank. Subclasses of ConfigError count as
    ConfigError.
    """
    problem: Any = None
    if error is not None:
        kind = ConfigError if isinstance(error, ConfigError) else type(error)
        problem = [kind.__name__, str(error)]
    return {rank: (report[0], report[1]) for rank, report in enumerate(control.collect(problem)) if report}
