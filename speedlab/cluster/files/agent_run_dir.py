"""A host's own copy of a run folder that it does not see: in its agent's folder, whose path its ranks get in a
variable.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

RUNS = "SPEEDLAB_HOST_RUNS"
"""Environment variable of an engine in a cluster of several hosts: the folder of these copies."""
RUNS_FOLDER = "runs"
"""Name of that folder, in the agent's folder."""
ORIGIN = "origin"
"""File next to a copy, with the path of the original run folder."""


def place_of(runs: Path, folder: str) -> Path:
    """Return the path of a copy below `runs`; runs of one name from several folders stay separate.

    Args:
        runs: Folder of all copies.
        folder: Path of the original.
    """
    return runs / hashlib.sha256(folder.encode()).hexdigest()[:16] / Path(folder).name


def folder_here(folder: str) -> str:
    """Return, on a rank, this host's path of a run folder."""
    runs = os.environ.get(RUNS)
    own = place_of(Path(runs), folder) if runs else None
    return str(own) if own is not None and own.exists() else folder


def origin_of(folder: str) -> str:
    """Return, on a rank, the original of this host's copy, or `folder` itself."""
    try:
        return (Path(folder).parent / ORIGIN).read_text()
    except OSError:
        return folder
