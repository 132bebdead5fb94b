"""What fails on one rank fails on all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from speedlab.telemetry.checkpoint_index import CheckpointError

if TYPE_CHECKING:
    from speedlab.comm import Group

T = TypeVar("T")


def all_or_none(group: Group, work: Callable[[], T]) -> T:
    """Run `work` on every rank; if it fails on one, every rank raises CheckpointError with that rank's reason."""
    problem: str | None = None
    cause: Exception | None = None
    result: list[T] = []
    try:
        result.append(work())
    except CheckpointError as error:
        problem = str(error)
    except OSError as error:
        problem = f"{error.filename or ''}: {error.strerror or error}"
    except Exception as error:  # The others would wait for this rank.
        problem, cause = f"{type(error).__name__}: {error}", error
    for report in group.collect(problem):
        if report is not None:
            raise CheckpointError(report) from cause
    return result[0]


def on_first(group: Group, work: Callable[[], None]) -> None:
    """Run `work` on the group's first rank alone; if it fails, every rank raises CheckpointError."""
    all_or_none(group, work if group.index == 0 else lambda: None)
