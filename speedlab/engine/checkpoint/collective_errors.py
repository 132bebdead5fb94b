"""Collective errors: a failure on one rank raises on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from speedlab.telemetry.checkpoint_index import CheckpointError

if TYPE_CHECKING:
    from speedlab.comm import Group

T = TypeVar("T")


def all_or_none(group: Group, work: Callable[[], T]) -> T:
    """Run work on every rank; a failure on one rank raises on all.

    Args:
        group: The ranks.
        work: Work of this rank, without collectives.

    Returns:
        The result of `work`.

    Raises:
        CheckpointError: With the reason of the rank that failed.
    """
    problem: str | None = None
    cause: Exception | None = None
    result: list[T] = []
    try:
        result.append(work())
    except CheckpointError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or ''}: {error.strerror or error}"
    except Exception as error:  # Any error, because the other ranks would wait for this one.
        problem, cause = f"{type(error).__name__}: {error}", error
    for report in group.collect(problem):
        if report is not None:
            raise CheckpointError(report) from cause
    return result[0]


def on_first(group: Group, work: Callable[[], None]) -> None:
    """Run work on the group's first rank only.

    Args:
        group: The ranks.
        work: Work of the first rank.

    Raises:
        CheckpointError: On every rank, if the work fails.
    """
    all_or_none(group, work if group.index == 0 else lambda: None)
