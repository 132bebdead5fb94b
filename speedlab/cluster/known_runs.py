"""Registry of the runs of a cluster, with their folders, so that a new kernel finds them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from pathlib import Path
from typing import Protocol

from speedlab.cluster.errors import ClusterError
from speedlab.config.errors import with_more
from speedlab.telemetry.checkpoint_index import newest
from speedlab.telemetry.records import RESTING
from speedlab.telemetry.run_folder import (
    RunFolder,
    RunFolderError,
    find_runs,
    read_object,
    write_atomically,
)

_REMEMBERED_RUNS = 100
_SEEN_RUNS = 500
_MOST_BYTES = 2**23
"""More than the longest possible list of paths."""
_SEEN_FILE = ".runs-seen.json"
"""File next to the folders of clusters; no cluster name begins with a dot."""


RUN_MIME = "application/vnd.speedlab.run+json"
"""MIME type that names a run to a Jupyter page; with our server extension, the page displays the live run."""


class RunError(RuntimeError):
    """The run cannot do what was asked. The message says its state and what to do."""

    def _render_traceback_(self) -> list[str]:
        """Return what IPython shows: only the message, because the frames are internal."""
        return [f"{type(self).__name__}: {with_more(self)}"]


class KnownCluster(Protocol):
    """The part of a cluster that identifies it: folder, name and token."""

    @property
    def directory(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def token(self) -> str: ...


def run_id(path: Path) -> str:
    """Return the id of a run folder for pages; it does not reveal the path."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def run_data(path: Path) -> dict[str, object]:
    """Return the data of a run for RUN_MIME."""
    return {"version": 1, "run": run_id(path), "name": path.name}


def remember_run(cluster: KnownCluster, path: Path) -> None:
    """Record a run in the cluster's folder, so that a kernel in another directory finds it.

    Args:
        cluster: Cluster of the run.
        path: Folder of the run.
    """
    paths = [str(path), *(str(known) for known in remembered_runs(cluster) if known != path)]
    write_atomically(_runs_file(cluster), json.dumps({"runs": paths[:_REMEMBERED_RUNS]}))
    note_seen(cluster.directory.parent, path)


def remembered_runs(cluster: KnownCluster) -> list[Path]:
    """Return the run folders of this cluster, newest first; some may be deleted.

    If the list is damaged, return the runs in the user's registry with the token of this cluster.

    Args:
        cluster: Cluster with or without a known token.
    """
    paths = _paths_in(_runs_file(cluster))
    if paths is None:
        seen = _opened(seen_runs(cluster.directory.parent)) if cluster.token else []
        return [folder.path for folder in seen if runs_here(folder, cluster)]
    return paths


def note_seen(root: Path, path: Path) -> None:
    """Record a run folder in the user's registry, which outlives clusters.

    Args:
        root: Folder of all clusters.
        path: Folder of the run.
    """
    # Two clusters may write at once and lose a line. The next start of that run adds it again.
    paths = [str(path), *(str(known) for known in seen_runs(root) if known != path)]
    write_atomically(root / _SEEN_FILE, json.dumps({"runs": paths[:_SEEN_RUNS]}))


def seen_runs(root: Path) -> list[Path]:
    """Return the run folders of all clusters of the user, newest first; some may be deleted.

    A damaged registry counts as empty; the next run replaces it.
    """
    return _paths_in(root / _SEEN_FILE) or []


def _paths_in(file: Path) -> list[Path] | None:
    """Return the paths in a list; None if it is damaged."""
    with contextlib.suppress(RunFolderError):
        paths = read_object(file, _MOST_BYTES, missing={"runs": []}).get("runs")
        if isinstance(paths, list):
            return [Path(path) for path in paths if isinstance(path, str)]
    return None


def _runs_file(cluster: KnownCluster) -> Path:
    """Return the path of the list in the cluster's folder."""
    return cluster.directory / "runs.json"


def remembered_folders(cluster: KnownCluster) -> list[RunFolder]:
    """Return the existing runs of this cluster, newest first."""
    return _opened(remembered_runs(cluster))


def known_folders(cluster: KnownCluster) -> list[RunFolder]:
    """Return the readable runs of this cluster and those in ./runs."""
    return _opened([*remembered_runs(cluster), *(path.resolve() for path in find_runs("runs"))])


def _opened(paths: list[Path]) -> list[RunFolder]:
    folders = []
    for path in dict.fromkeys(paths):
        try:
            folder = RunFolder(path)
            folder.read_status()  # Callers read the status, so leave out folders without a readable one.
        except (RunFolderError, PermissionError):
            continue  # Deleted, damaged or owned by another user: not the run that the caller needs.
        folders.append(folder)
    return folders


def runs_here(folder: RunFolder, cluster: KnownCluster) -> bool:
    """Return whether the engines of `cluster` hold the state of this run.

    Args:
        folder: Folder of the run.
        cluster: The cluster.
    """
    return folder.read_status().token == cluster.token


def saved_step(folder: RunFolder) -> int | None:
    """Return the step of the newest checkpoint.

    Args:
        folder: Folder of the run.

    Returns:
        The step; None without a checkpoint.
    """
    kept = newest(folder.path / "checkpoints")
    return kept.step if kept is not None else None


def refuse_second_run(cluster: KnownCluster) -> None:
    """Check that no run is active on these engines.

    Args:
        cluster: Cluster of the engines.

    Raises:
        ClusterError: If a run is active.
    """
    for folder in known_folders(cluster):
        status = folder.read_status()
        if status.state not in RESTING and runs_here(folder, cluster):
            raise ClusterError(
                f"run {folder.name!r} is {status.state} on {cluster.name!r}, step {status.step} of {status.steps}; "
                f"pause or stop it first, or start a cluster of another name"
            )
