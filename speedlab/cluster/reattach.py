"""Finding a run again that was started elsewhere: its folder by name, and the engines that hold its state."""

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
    """The handle of a run that was started elsewhere: by an earlier kernel, or by `speedlab train`.

    `name` is a run's name or folder. Without it, the run of the running cluster that is training, else its newest one.
    A named run whose engines are gone is opened to be looked at, and to be resumed in others. Raises ClusterError when
    no cluster is running, RunError when there is no such run.
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
    """The run folder at the path `name`, or of that name in `parent` or among the runs of a running cluster."""
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
        if path.is_dir() and path != Path(path.name):  # A folder of runs has it: it says what it lacks.
            return RunFolder(path)
    raise RunError(f"there is no run {str(name)!r}; runs in {find_runs_text(parent.resolve())}")
