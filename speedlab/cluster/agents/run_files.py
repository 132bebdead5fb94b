"""Functions that run in an agent whose host does not see the run's folder: the run has one there, in the agent's own,
and what ranks write into it is asked for from the cluster's side (`supervisor/wire.py`).

Lines are told from the byte at which they were left off, other files whole when they have changed. Plain data goes in
and comes out.
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
"""Of one answer; what is more comes with the next."""
_FILES = (PROOF, "placement/*.json", "tokenizer/*", "tensorboard/*")
"""What ranks write besides lines; of a control word rank 0's host tells the status."""


def sees(folder: str, configuration: str) -> bool:
    """Whether the folder of a run is seen here, with that text as its configuration."""
    try:
        return (Path(folder) / "config.json").read_text() == configuration
    except OSError:
        return False


def not_here(paths: Sequence[str]) -> list[str]:
    """Those of the files and folders that are not on this host."""
    return [path for path in paths if not Path(path).exists()]


def own_folder(folder: str) -> Path:
    """Where this host has its folder of the run whose folder elsewhere is `folder`."""
    return place_of(agent_tasks.own_folder() / RUNS_FOLDER, folder)


def receive(folder: str, files: Mapping[str, str]) -> None:
    """Write these files of the run's folder."""
    own = own_folder(folder)
    own.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_atomically(own.parent / ORIGIN, folder)
    for sub in ("records", "control", "checkpoints", "stream"):
        (own / sub).mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, text in files.items():
        write_atomically(own / name, text)


def news(folder: str, known: Mapping[str, Any], first: bool) -> dict[str, tuple[Any, bytes]]:
    """What is new in this host's folder of a run: (what is to be known next time, bytes to append or the whole file) by
    name. `known`: of lines the byte up to which they were told, of other files a stamp. `first`: of rank 0's host,
    which tells of events and of the status.

    The status is read first and told last: what it counts as done is among the events then.
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
    """Whole lines from `start` on, and whether there is no more."""
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
