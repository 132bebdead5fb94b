"""Which runs a cluster was given, and where their folders are: how a new kernel finds them again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from speedlab.cluster.advance import RESTING
from speedlab.cluster.errors import ClusterError
from speedlab.telemetry.checkpoints import newest
from speedlab.telemetry.folder import (
    RunFolder,
    RunFolderError,
    find_runs,
    read_object,
    write_atomically,
)

if TYPE_CHECKING:
    from speedlab.cluster.cluster import Cluster

_REMEMBERED_RUNS = 100


class RunError(RuntimeError):
    """The run cannot do what was asked; the message says where it stands and what to do."""


def remember_run(cluster: Cluster, path: Path) -> None:
    """Note in the cluster's own folder where this run is, so that a kernel in another directory finds it."""
    if (file := _runs_file(cluster)) is None:
        return
    paths = [str(path), *(str(known) for known in remembered_runs(cluster) if known != path)]
    write_atomically(file, json.dumps({"runs": paths[:_REMEMBERED_RUNS]}))


def remembered_runs(cluster: Cluster) -> list[Path]:
    """Folders of the runs this cluster was given, newest first; some may be gone."""
    file = _runs_file(cluster)
    paths = read_object(file, 2**18, missing={}).get("runs", []) if file is not None else []
    return [Path(path) for path in paths if isinstance(path, str)]


def _runs_file(cluster: Cluster) -> Path | None:
    """Beside the cluster's own files; None for a cluster that keeps none, whose runs are looked for in ./runs only."""
    directory: Path | None = getattr(cluster, "directory", None)
    return directory / "runs.json" if directory is not None else None


def known_folders(cluster: Cluster) -> list[RunFolder]:
    """The runs this cluster was given and those in ./runs."""
    folders = []
    for path in dict.fromkeys([*remembered_runs(cluster), *(path.resolve() for path in find_runs("runs"))]):
        try:
            folders.append(RunFolder(path))
        except RunFolderError:
            continue  # Removed since, or damaged: it is not the run that is looked for.
    return folders


def runs_here(folder: RunFolder, cluster: Cluster, pids: set[int]) -> bool:
    """Whether the engines that hold this run's state are the ones of `cluster`."""
    status = folder.read_status()
    return bool(pids & set(status.rank_pids)) if status.rank_pids else status.cluster == cluster.name


def saved_step(folder: RunFolder) -> int | None:
    """The step of the checkpoint from which the run would go on in other engines."""
    kept = newest(folder.path / "checkpoints")
    return kept.step if kept is not None else None


def refuse_second_run(cluster: Cluster, pids: tuple[int, ...]) -> None:
    """Raise ClusterError while a run is under way on these engines."""
    for folder in known_folders(cluster):
        status = folder.read_status()
        if status.state not in RESTING and set(status.rank_pids) & set(pids):
            raise ClusterError(
                f"run {folder.name!r} is {status.state} on {cluster.name!r}, step {status.step} of {status.steps}; "
                f"pause or stop it first, or start a cluster of another name"
            )
