"""Find a run that was started elsewhere: its folder by name, and the engines that hold its state."""

from __future__ import annotations

import os
from pathlib import Path

from speedlab.cluster.cluster import Cluster
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.known_runs import RunError, known_folders, remembered_runs, runs_here
from speedlab.cluster.run import Run
from speedlab.telemetry.records import RESTING
from speedlab.telemetry.run_folder import RunFolder, find_runs_text


def attach(name: str | os.PathLike[str] | None = None) -> Run:
    """Return the handle to a run that was started elsewhere: by an earlier kernel, or by `speedlab train`.

    Args:
        name: Name or folder of the run. None for the training run of the running cluster, or else its newest run. A run
            without engines is opened for reading, and can be resumed in other engines.

    Raises:
        ClusterError: If `name` is None and no cluster runs.
        RunError: If there is no such run.
    """
    if name is None:
        cluster = Cluster.attach()
        folders = [folder for folder in known_folders(cluster) if runs_here(folder, cluster)]
        if not folders:
            raise RunError(f"cluster {cluster.name!r} has no run; runs in {find_runs_text(Path('runs').resolve())}")
        folders.sort(key=lambda folder: (folder.read_status().state not in RESTING, folder.read_status().updated))
        return Run(folders[-1], cluster)
    folder = folder_named(name)
    try:
        cluster = Cluster.attach(folder.read_status().cluster or None)
    except ClusterError:
        return Run(folder, attach=Cluster.attach)
    return Run(folder, cluster) if runs_here(folder, cluster) else Run(folder, attach=Cluster.attach)


def folder_named(name: str | os.PathLike[str], parent: Path = Path("runs")) -> RunFolder:
    """Return a run folder by path, or by name in `parent` or among the runs of a running cluster.

    Args:
        name: Path or name.
        parent: Folder of runs.

    Raises:
        RunError: If there is no such run.
    """
    places = (Path(name), parent / name)
    for path in places:
        if (path / "config.json").is_file():
            return RunFolder(path)
    try:
        known = remembered_runs(Cluster.attach())
    except ClusterError:
        known = []
    for path in known:
        if path.name == str(name) and path.is_dir():
            return RunFolder(path)
    for path in places:
        # The folder exists but is incomplete: RunFolder raises an error that says what is missing.
        if path.is_dir() and path != Path(path.name):
            return RunFolder(path)
    raise RunError(f"there is no run {str(name)!r}; runs in {find_runs_text(parent.resolve())}")
