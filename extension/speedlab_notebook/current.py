"""The cluster and the run that a magic means when it names none.

`cluster` and `run` in the user's namespace, as `%speedlab start` and `%speedlab attach` set them; else what is running
is looked up and these names are set, unless the user has given them to something else.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from speedlab.cluster import Cluster, Run
    from speedlab.telemetry.run_folder import RunFolder


def cluster_at_hand(shell: InteractiveShell, name: str | None = None) -> Cluster:
    """The cluster of the namespace if it runs (and has the name asked for), else one that runs. Raises ClusterError."""
    from speedlab.cluster import Cluster

    held: Any = shell.user_ns.get("cluster")
    if isinstance(held, Cluster) and name in (None, held.name) and held.running:
        held.start()  # Connects anew, where another kernel has stopped and started it; else it does nothing.
        return held
    cluster = Cluster.attach(name)
    if held is None or isinstance(held, Cluster):
        shell.push({"cluster": cluster})
    return cluster


def held_run(shell: InteractiveShell) -> Run | None:
    """The run of the user's namespace."""
    from speedlab.cluster import Run

    held: Any = shell.user_ns.get("run")
    return held if isinstance(held, Run) else None


def run_at_hand(shell: InteractiveShell, name: str | None = None) -> Run:
    """The run of this name or folder; without one the namespace's, or, once that has ended, the one that is under way;
    else the newest in ./runs, to be looked at.

    Raises RunError or ClusterError when there is none.
    """
    from speedlab.cluster import ClusterError, attach
    from speedlab.cluster.known_runs import RunError
    from speedlab.telemetry.run_folder import find_runs

    held = held_run(shell)
    if name is not None:
        if held is not None and name in (held.name, str(held.folder.path)):
            return held
        run = attach(name)
    elif held is not None and (held.state not in _ended() or held.cluster is None or not held.cluster.running):
        return held
    elif held is not None:
        later = [folder for folder in active_runs(cluster_at_hand(shell)) if folder.path != held.folder.path]
        if not later:
            return held
        run = attach(later[-1].path)
    else:
        try:
            run = attach()
        except (ClusterError, RunError):
            if not (kept := find_runs("runs")):
                raise
            run = attach(kept[0])
    push_run(shell, run)
    return run


def push_run(shell: InteractiveShell, run: Run) -> None:
    """Set `run`, and `cluster` when the run has engines here, in the user's namespace."""
    shell.push({"run": run} if run.cluster is None else {"run": run, "cluster": run.cluster})


def active_runs(cluster: Cluster) -> list[RunFolder]:
    """Runs on these engines that have not ended, so that something would be lost with the engines; oldest first."""
    from speedlab.cluster.known_runs import known_folders, runs_here

    found = []
    for folder in known_folders(cluster):
        if folder.read_status().state not in _ended() and runs_here(folder, cluster):
            found.append(folder)
    return sorted(found, key=lambda folder: folder.read_status().updated)


def training_run(cluster: Cluster) -> RunFolder | None:
    """The run that keeps these engines busy now."""
    from speedlab.telemetry.records import RESTING

    running = [folder for folder in active_runs(cluster) if folder.read_status().state not in RESTING]
    return running[-1] if running else None


def standing(folder: RunFolder) -> str:
    """'run 'quickstart' is paused at step 12 of 200'."""
    from speedlab.telemetry.record_store import last_recorded

    status = folder.read_status()
    step = max(status.step, last_recorded(folder.path, 0) or 0)  # The status is written when the state changes alone.
    return f"run {folder.name!r} is {status.state} at step {step:,} of {status.steps:,}"


def run_names(shell: InteractiveShell) -> set[str]:
    """Names for completion: the runs in ./runs and those the namespace's cluster was given."""
    from speedlab.cluster import Cluster
    from speedlab.cluster.known_runs import remembered_runs
    from speedlab.telemetry.run_folder import find_runs

    held: Any = shell.user_ns.get("cluster")
    known = remembered_runs(held) if isinstance(held, Cluster) else []
    return {path.name for path in (*known, *find_runs(Path("runs")))}


def _ended() -> frozenset[Any]:
    from speedlab.telemetry.records import RunState

    return frozenset({RunState.FINISHED, RunState.STOPPED, RunState.FAILED})


def can_ask(shell: InteractiveShell) -> bool:
    """Whether somebody can be asked for a line: not where a notebook runs by itself (nbconvert, papermill)."""
    kernel = getattr(shell, "kernel", None)
    return bool(getattr(kernel, "_allow_stdin", True))
