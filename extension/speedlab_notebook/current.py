"""The current cluster and run, which a magic uses if its line names none.

1. `cluster` and `run` in the user's namespace, as `%speedlab start` and `%speedlab attach` set them.
2. If these are missing or have ended, a running cluster or a run is looked up, and the names are set. A lookup of a
   cluster alone does not replace a `cluster` that the user has bound to another object.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from speedlab.cluster import Cluster, Run
    from speedlab.telemetry.run_folder import RunFolder


def cluster_at_hand(shell: InteractiveShell, name: str | None = None) -> Cluster:
    """Return the cluster of the namespace if it runs, else another running cluster.

    Args:
        shell: The IPython shell; `cluster` is set in its namespace.
        name: The cluster's name; None accepts any.

    Raises:
        ClusterError: No such cluster runs.
    """
    from speedlab.cluster import Cluster

    held: Any = shell.user_ns.get("cluster")
    if isinstance(held, Cluster) and name in (None, held.name) and held.running:
        held.start()  # Reconnects if another kernel restarted the cluster; otherwise does nothing.
        return held
    cluster = Cluster.attach(name)
    if held is None or isinstance(held, Cluster):
        shell.push({"cluster": cluster})
    return cluster


def held_run(shell: InteractiveShell) -> Run | None:
    """Return the run of the user's namespace; None if `run` is missing or another object.

    Args:
        shell: The IPython shell.
    """
    from speedlab.cluster import Run

    held: Any = shell.user_ns.get("run")
    return held if isinstance(held, Run) else None


def run_at_hand(shell: InteractiveShell, name: str | None = None) -> Run:
    """Return the run that a magic means, and set `run` in the user's namespace.

    Without a name:

    1. the namespace's run, if it has not ended or its engines do not run;
    2. after that run has ended, the newest active run on the cluster, else the ended run;
    3. without a run in the namespace, the run that can be attached, else the newest in ./runs.

    Args:
        shell: The IPython shell.
        name: The name or folder of a run.

    Raises:
        RunError: There is no such run.
        ClusterError: There is no cluster and no run.
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
    """Set `run` in the user's namespace, and `cluster` if the run has engines here.

    Args:
        shell: The IPython shell.
        run: The run.
    """
    shell.push({"run": run} if run.cluster is None else {"run": run, "cluster": run.cluster})


def active_runs(cluster: Cluster) -> list[RunFolder]:
    """Return the runs on these engines that have not ended, oldest first. They lose unsaved steps if the engines end.

    Args:
        cluster: A running cluster.
    """
    from speedlab.cluster.known_runs import known_folders, runs_here

    found = []
    for folder in known_folders(cluster):
        if folder.read_status().state not in _ended() and runs_here(folder, cluster):
            found.append(folder)
    return sorted(found, key=lambda folder: folder.read_status().updated)


def training_run(cluster: Cluster) -> RunFolder | None:
    """Return the run that keeps the engines busy now; None if no run computes.

    Args:
        cluster: A running cluster.
    """
    from speedlab.telemetry.records import RESTING

    running = [folder for folder in active_runs(cluster) if folder.read_status().state not in RESTING]
    return running[-1] if running else None


def standing(folder: RunFolder) -> str:
    """Return the state of a run as text: "run 'quickstart' is paused at step 12 of 200".

    Args:
        folder: The run's folder.
    """
    from speedlab.telemetry.record_store import last_recorded

    status = folder.read_status()
    step = max(status.step, last_recorded(folder.path, 0) or 0)  # The status is written only when the state changes.
    return f"run {folder.name!r} is {status.state} at step {step:,} of {status.steps:,}"


def run_names(shell: InteractiveShell) -> set[str]:
    """Return names for completion: the runs in ./runs, and the runs that the namespace's cluster remembers.

    Args:
        shell: The IPython shell.
    """
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
    """Return whether the user can be asked for input; False if a program runs the notebook (nbconvert, papermill).

    Args:
        shell: The IPython shell.
    """
    kernel = getattr(shell, "kernel", None)
    return bool(getattr(kernel, "_allow_stdin", True))
