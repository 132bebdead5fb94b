"""Cells that run between two steps: files in the run folder with their code and with the ranks' output.

The caller seals and checks the files, and passes functions that read and write them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from speedlab.telemetry.run_folder import RunFolderError

MOST_BYTES = 2**20
"""Maximum bytes of a rank's output in a cell. Later output is dropped, with a notice."""
_MOST_RANKS_BYTES = 2**28
_MOST_ANSWERS = 16
"""Maximum number of unread answers that a run keeps."""


class CellOutcome(NamedTuple):
    """Result of a cell on one rank; all fields are JSON."""

    messages: list[Any]
    """[kind, content] of Jupyter messages: streams, displays, the result."""
    text: str | None
    """Text of the last expression's value."""
    failure: dict[str, Any] | None
    """The fields of a RemoteFailure, if the cell raised."""


def cell_path(folder: Path, cell: str) -> Path:
    """Return the path of a cell's code in the run folder.

    Args:
        folder: The run folder.
        cell: Id of the cell.

    Raises:
        RunFolderError: `live` is a symbolic link. Old files are deleted there, and a link could lead out of the
            folder.
    """
    path = folder / "live" / f"{cell}.cell"
    if path.parent.is_symlink():
        raise RunFolderError(f"{path.parent} leads out of the run's folder; remove it, and run the cell again")
    return path


def write_said(
    folder: Path, cell: str, said: Sequence[CellOutcome | None], write: Callable[[Path, bytes], object]
) -> None:
    """Write the ranks' output of a cell, and delete the oldest unread answers.

    Args:
        folder: The run folder.
        cell: Id of the cell.
        said: Outcome by rank; None for ranks that did not run the cell.
        write: Writes a file atomically.

    Raises:
        RunFolderError: See `cell_path`.
    """
    path = cell_path(folder, cell).with_suffix(".json")
    write(path, json.dumps(said).encode())
    answers = []
    for answer in path.parent.glob("*.json"):
        with suppress(FileNotFoundError):  # A reader has just taken it.
            answers.append((answer.stat().st_mtime_ns, answer))
    for _, old in sorted(answers)[:-_MOST_ANSWERS]:
        old.unlink(missing_ok=True)


def take_said(folder: Path, cell: str, read: Callable[[Path], bytes]) -> dict[int, CellOutcome]:
    """Read the ranks' output of a cell, and delete the file.

    Args:
        folder: The run folder.
        cell: Id of the cell.
        read: Returns the content of a file. Its exceptions pass through, unless they are OSError, ValueError or
            TypeError.

    Returns:
        Outcome by rank.

    Raises:
        RunFolderError: The file is missing, damaged or too large.
    """
    path = cell_path(folder, cell).with_suffix(".json")
    try:
        if path.stat().st_size > _MOST_RANKS_BYTES:
            raise RunFolderError(f"{path}: larger than anything that ranks say in a cell")
        found = json.loads(read(path))
        said = {rank: _checked(value) for rank, value in enumerate(found) if value is not None}
    except (OSError, ValueError, TypeError) as error:
        raise RunFolderError(f"{path}: what ranks said in the cell cannot be read: {error}") from error
    path.unlink(missing_ok=True)
    return said


def _checked(value: Any) -> CellOutcome:
    messages, text, failure = value
    for kind, content in messages:
        if not isinstance(kind, str) or not isinstance(content, dict):
            raise ValueError(f"{kind!r:.64} is no message")
    if not isinstance(text, str | None) or not isinstance(failure, dict | None):
        raise ValueError("an answer of other fields")
    return CellOutcome(messages, text, failure)
