"""Functions that run in an agent whose host does not see the run folder.

The host has its own copy of the run folder, in the agent's folder. The supervisor fetches what ranks write there
(`supervisor/record_relay.py`). Lines are returned from the last position on; other files are returned whole after a
change. Arguments and results are plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import speedlab.cluster.agents.tasks as agent_tasks
from speedlab.cluster.files.agent_run_dir import ORIGIN, RUNS_FOLDER, place_of
from speedlab.telemetry.proof import PROOF
from speedlab.telemetry.run_folder import write_atomically

MOST_BYTES = 8 * 2**20
"""Maximum size of the lines in one answer; the rest follows in the next."""
_FILES = (PROOF, "placement/*.json", "tokenizer/*", "tensorboard/*")
"""Files other than lines that ranks write. Rank 0's host reports the result of commands in the status."""


def sees(folder: str, configuration: str) -> bool:
    """Return whether this host sees the run folder.

    Args:
        folder: Folder of the run.
        configuration: Expected text of its config.json.
    """
    try:
        return (Path(folder) / "config.json").read_text() == configuration
    except OSError:
        return False


def not_here(paths: Sequence[str]) -> list[str]:
    """Return the paths that do not exist on this host.

    Args:
        paths: Files and folders.
    """
    return [path for path in paths if not Path(path).exists()]


def own_folder(folder: str) -> Path:
    """Return this host's copy of a run folder.

    Args:
        folder: Folder of the run on the supervisor's host.
    """
    return place_of(agent_tasks.own_folder() / RUNS_FOLDER, folder)


def receive(folder: str, files: Mapping[str, str]) -> None:
    """Write files into this host's copy of a run folder.

    Args:
        folder: Folder of the run on the supervisor's host.
        files: Text by file name.
    """
    own = own_folder(folder)
    own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(own.parent / ORIGIN, folder)
    for sub in ("records", "control", "checkpoints", "stream"):
        (own / sub).mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomically(own / name, text)


def news(folder: str, known: Mapping[str, Any], first: bool) -> dict[str, tuple[Any, bytes]]:
    """Return what is new in this host's copy of a run folder.

    The status is read first and returned last, so that the events include everything that the status counts as done.

    Args:
        folder: Folder of the run on the supervisor's host.
        known: Position by file name: a byte offset for lines, a stamp for other files.
        first: Whether this is rank 0's host, which returns events and the status.

    Returns:
        (new position, bytes to append or the whole file) by file name.
    """
    own = own_folder(folder)
    found: dict[str, tuple[Any, bytes]] = {}
    status = _changed(own, own / "status.json", known) if first else {}
    left, whole = MOST_BYTES, True
    for path in [*sorted(own.glob("records/*.jsonl")), *([own / "events.jsonl"] if first else [])]:
        name = str(path.relative_to(own))
        lines, all_of_them = _lines(path, known.get(name, 0), left)
        whole = whole and all_of_them
        if lines:
            found[name] = (known.get(name, 0) + len(lines), lines)
            left -= len(lines)
    for pattern in _FILES:
        for path in sorted(own.glob(pattern)):
            found |= _changed(own, path, known)
    return found | (status if whole else {})


def _lines(path: Path, start: int, most_bytes: int) -> tuple[bytes, bool]:
    """Return whole lines from `start` on, and whether that is all."""
    try:
        with path.open("rb") as file:
            file.seek(start)
            data = file.read(max(0, most_bytes))
            more = bool(file.read(1))
    except FileNotFoundError:
        return b"", True
    return data[: data.rfind(b"\n") + 1], not more


def _changed(own: Path, path: Path, known: Mapping[str, Any]) -> dict[str, tuple[Any, bytes]]:
    try:
        found = path.stat()
        stamp = [found.st_mtime_ns, found.st_ino, found.st_size]
        name = str(path.relative_to(own))
        return {} if known.get(name) == stamp else {name: (stamp, path.read_bytes())}
    except FileNotFoundError:
        return {}
