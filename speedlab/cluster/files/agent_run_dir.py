"""Where a host has the folder of a run that it does not see: in that of its agent, which its ranks are told of."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

RUNS = "SPEEDLAB_HOST_RUNS"
"""Environment variable of an engine on a host of several: the folder of these folders."""
RUNS_FOLDER = "runs"
"""Its name, in the folder of the host's agent."""
ORIGIN = "origin"
"""File beside a run's folder here, with the one that it stands for."""


def place_of(runs: Path, folder: str) -> Path:
    """Where below `runs` is what stands for `folder`; runs of one name from several folders do not meet."""
    return runs / hashlib.sha256(folder.encode()).hexdigest()[:16] / Path(folder).name


def folder_here(folder: str) -> str:
    """For ranks: where this host has the run's folder."""
    runs = os.environ.get(RUNS)
    own = place_of(Path(runs), folder) if runs else None
    return str(own) if own is not None and own.exists() else folder


def origin_of(folder: str) -> str:
    """For ranks: the folder for which that of this host stands, or itself."""
    try:
        return (Path(folder).parent / ORIGIN).read_text()
    except OSError:
        return folder
