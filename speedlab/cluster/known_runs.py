"""Which runs a cluster was given, and where their folders are: how a new kernel finds them again."""

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
"""More than so many paths take, however long they are."""
_SEEN_FILE = ".runs-seen.json"
"""Beside the clusters' folders; no cluster may have a name that begins so."""


RUN_MIME = "application/vnd.speedlab.run+json"
"""Names a run to pages of a Jupyter server with our extension, which show it live through that."""


class RunError(RuntimeError):
    """The run cannot do what was asked; the message says where it stands and what to do."""

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the frames that found it out say nothing more."""
        return [f"{type(self).__name__}: {with_more(self)}"]


class KnownCluster(Protocol):
    """A cluster, as far as it is known by its folder and its token."""

    @property
    def directory(self) -> Path: ...
    @property
    def name(self) -> str: ...
    @property
    def token(self) -> str: ...


def run_id(path: Path) -> str:
    """The id of a run's folder, by which pages name it: it says nothing of where that is."""
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:16]


def run_data(path: Path) -> dict[str, object]:
    """A run's folder under RUN_MIME."""
    return {"version": 1, "run": run_id(path), "name": path.name}


def remember_run(cluster: KnownCluster, path: Path) -> None:
    """Note in the cluster's own folder where this run is, so that a kernel in another directory finds it."""
    paths = [str(path), *(str(known) for known in remembered_runs(cluster) if known != path)]
    write_atomically(_runs_file(cluster), json.dumps({"runs": paths[:_REMEMBERED_RUNS]}))
    note_seen(cluster.directory.parent, path)


def remembered_runs(cluster: KnownCluster) -> list[Path]:
    """Folders of the runs this cluster was given, newest first; some may be gone. Where its list is damaged, those of
    the person's registry that it holds or has held, as far as its token is known."""
    paths = _paths_in(_runs_file(cluster))
    if paths is None:
        seen = _opened(seen_runs(cluster.directory.parent)) if cluster.token else []
        return [folder.path for folder in seen if runs_here(folder, cluster)]
    return paths


def note_seen(root: Path, path: Path) -> None:
    """Note a run's folder in the registry of a person, which outlives clusters. `root`: the folder of all clusters."""
    # Two clusters may write at once; the list that loses a line has it again with that run's next start.
    paths = [str(path), *(str(known) for known in seen_runs(root) if known != path)]
    write_atomically(root / _SEEN_FILE, json.dumps({"runs": paths[:_SEEN_RUNS]}))


def seen_runs(root: Path) -> list[Path]:
    """Folders of the runs that any cluster of a person was given, newest first; some may be gone. A damaged registry
    is an empty one: it is written anew with the next run."""
    return _paths_in(root / _SEEN_FILE) or []


def _paths_in(file: Path) -> list[Path] | None:
    """None where it is damaged."""
    with contextlib.suppress(RunFolderError):
        paths = read_object(file, _MOST_BYTES, missing={"runs": []}).get("runs")
        if isinstance(paths, list):
            return [Path(path) for path in paths if isinstance(path, str)]
    return None


def _runs_file(cluster: KnownCluster) -> Path:
    """Beside the cluster's own files."""
    return cluster.directory / "runs.json"


def remembered_folders(cluster: KnownCluster) -> list[RunFolder]:
    """The runs this cluster was given that are still there, newest first."""
    return _opened(remembered_runs(cluster))


def known_folders(cluster: KnownCluster) -> list[RunFolder]:
    """The runs this cluster was given and those in ./runs, but for those that cannot be read."""
    return _opened([*remembered_runs(cluster), *(path.resolve() for path in find_runs("runs"))])


def _opened(paths: list[Path]) -> list[RunFolder]:
    folders = []
    for path in dict.fromkeys(paths):
        try:
            folder = RunFolder(path)
            folder.read_status()  # Who asks for these folders looks at their statuses.
        except (RunFolderError, PermissionError):
            continue  # Removed since, damaged or another person's: it is not the run that is looked for.
        folders.append(folder)
    return folders


def runs_here(folder: RunFolder, cluster: KnownCluster) -> bool:
    """Whether the engines that hold this run's state are those of `cluster`."""
    return folder.read_status().token == cluster.token


def saved_step(folder: RunFolder) -> int | None:
    """The step of the checkpoint from which the run would go on in other engines."""
    kept = newest(folder.path / "checkpoints")
    return kept.step if kept is not None else None


def refuse_second_run(cluster: KnownCluster) -> None:
    """Raise ClusterError while a run is under way on these engines."""
    for folder in known_folders(cluster):
        status = folder.read_status()
        if status.state not in RESTING and runs_here(folder, cluster):
            raise ClusterError(
                f"run {folder.name!r} is {status.state} on {cluster.name!r}, step {status.step} of {status.steps}; "
                f"pause or stop it first, or start a cluster of another name"
            )
