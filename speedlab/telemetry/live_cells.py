"""Cells between two steps, in a run's folder: their code, and what ranks said in them; sealed by who wrote it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from speedlab.telemetry.run_folder import RunFolderError

MOST_BYTES = 2**20
"""Of what a rank says in a cell; what comes later is left out, and it is said."""
_MOST_RANKS_BYTES = 2**28
_MOST_ANSWERS = 16
"""So many answers that nobody has taken are kept of a run."""


class CellOutcome(NamedTuple):
    """What became of a cell on one rank; all of it JSON."""

    messages: list[Any]
    """[kind, content] of Jupyter's messages: streams, displays, the result."""
    text: str | None
    """Of the last expression."""
    failure: dict[str, Any] | None
    """The fields of a RemoteFailure, where it raised."""


def cell_path(folder: Path, cell: str) -> Path:
    """Where the code of a cell lies, in the folder of a run. Raises RunFolderError where that would be elsewhere: what
    is old is removed there."""
    path = folder / "live" / f"{cell}.cell"
    if path.parent.is_symlink():
        raise RunFolderError(f"{path.parent} leads out of the run's folder; remove it, and run the cell again")
    return path


def write_said(
    folder: Path, cell: str, said: Sequence[CellOutcome | None], write: Callable[[Path, bytes], object]
) -> None:
    """Keep what ranks said in a cell; None for those that did not run it. Of answers that nobody has taken the newest
    stay. `write`: makes the file, which is whole or not there."""
    path = cell_path(folder, cell).with_suffix(".json")
    write(path, json.dumps(said).encode())
    answers = []
    for answer in path.parent.glob("*.json"):
        with suppress(FileNotFoundError):  # Who has asked for it takes it just now.
            answers.append((answer.stat().st_mtime_ns, answer))
    for _, old in sorted(answers)[:-_MOST_ANSWERS]:
        old.unlink(missing_ok=True)


def take_said(folder: Path, cell: str, read: Callable[[Path], bytes]) -> dict[int, CellOutcome]:
    """What ranks said in a cell, by rank. Takes it out of the folder. `read`: what the file holds. Raises
    RunFolderError for what is missing or damaged, and what `read` raises."""
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
