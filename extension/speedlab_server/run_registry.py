"""The runs of a user, by ids that reveal no path: the runs of all known clusters, and those in ./runs."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import speedlab_server.schema as m
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files.cluster_dir import known_clusters, root
from speedlab.cluster.known_runs import remembered_runs, run_id, seen_runs
from speedlab.telemetry.record_store import last_record
from speedlab.telemetry.records import StepRecord
from speedlab.telemetry.run_folder import RunFolder, Status, find_runs, is_folder
from speedlab_server.errors import GoneError, UnknownError, reported
from speedlab_server.run_reader import Reader, summary_of

MOST_LISTED = 200
_LIST_SECONDS = 0.9
_IDLE_READERS = 8
_IDLE_SECONDS = 60.0


class ListedCluster(NamedTuple):
    """The parts of a cluster that its list of runs needs."""

    directory: Path
    name: str
    token: str


@dataclass
class _SeenRun:
    """A run as last listed, with the stamps of its files at that time."""

    folder: RunFolder
    status: Status
    record: StepRecord | None
    stamp: tuple[object, ...]


class Registry:
    """Finds runs and shares their readers. Safe to use from any thread; waits only for the disk."""

    def __init__(self, root_dir: str) -> None:
        """Create a registry.

        Args:
            root_dir: Root folder of the Jupyter server, whose ./runs is listed, too.
        """
        self._own = Path(root_dir or ".").expanduser() / "runs"
        self._paths: dict[str, Path] = {}
        self._seen: dict[str, _SeenRun] = {}
        self._listed: tuple[float, list[m.RunSummary]] = (float("-inf"), [])
        self._readers: dict[str, tuple[Reader, float]] = {}
        self._lock = threading.Lock()
        self._listing = threading.Lock()

    def path_of(self, id: str) -> Path:
        """Return the folder of a run.

        Args:
            id: Id of the run.

        Raises:
            UnknownError: There is no such run.
            GoneError: The folder has disappeared.
        """
        if id not in self._paths:
            self._find()
        if (path := self._paths.get(id)) is None:
            raise UnknownError(f"there is no run with the id {id[:64]!r}; the list of runs has those there are")
        if not _is_there(path):
            raise GoneError(f"the folder of run {path.name!r} is gone: it was removed or moved")
        return path

    def reader(self, id: str) -> Reader:
        """Return the shared reader of a run.

        Args:
            id: Id of the run.

        Raises:
            UnknownError: There is no such run.
            GoneError: The folder has disappeared.
            RunFolderError: The folder cannot be read.
        """
        path = self.path_of(id)
        with self._lock:
            reader, _ = self._readers.pop(id, (None, 0.0))
            if reader is None:
                reader = Reader(id, RunFolder(path))
            self._readers[id] = reader, time.monotonic()
            self._close_idle()
        return reader

    def close_idle(self) -> None:
        """Close readers that were not used for a while."""
        with self._lock:
            self._close_idle()

    def runs(self) -> list[m.RunSummary]:
        """Return every run, the newest first. A run that cannot be read has its error as text."""
        # One thread lists; the others wait and share its result.
        with self._listing:
            if time.monotonic() - self._listed[0] > _LIST_SECONDS:
                holders = live_tokens()
                found = [self._summary(id, path, holders) for id, path in self._find().items() if _is_there(path)]
                found.sort(key=lambda run: -run.updated)
                self._listed = time.monotonic(), found[:MOST_LISTED]
            return self._listed[1]

    def given_to(self, folder: Path, name: str) -> list[str]:
        """Return the ids of the runs of a cluster, the newest first.

        Args:
            folder: The cluster's folder.
            name: The cluster's name.
        """
        return [run_id(path) for path in remembered_runs(ListedCluster(folder, name, ""))]

    def _find(self) -> dict[str, Path]:
        paths = [*seen_runs(root()), *(path.resolve() for path in (*find_runs(self._own), *_closed(self._own)))]
        for folder, _ in known_clusters():
            paths += remembered_runs(ListedCluster(folder, folder.name, ""))
        found = {run_id(path): path for path in paths}
        self._paths |= found  # Keep old paths, so that a deleted run is "gone", not "unknown".
        return found

    def _summary(self, id: str, path: Path, holders: dict[str, str]) -> m.RunSummary:
        try:
            seen = self._look(id, path)
        except Exception as error:  # A damaged run must not hide the others.
            known = reported(error)
            text = known[1] if known else f"cannot be read ({type(error).__name__}); look at its folder"
            seen_text = self._seen[id].status.text if id in self._seen else ""
            return m.RunSummary(
                id=id, name=path.name, state="damaged", updated=_modified(path), text=seen_text, problem=text
            )
        newest = [seen.record] if seen.record is not None else []
        return summary_of(id, seen.folder, seen.status, newest, holders.get(seen.status.token, ""))

    def _look(self, id: str, path: Path) -> _SeenRun:
        files = [path / name for name in ("config.json", "status.json", "records/rank-0.jsonl")]
        stamp = tuple(map(_stamp, files))
        seen = self._seen.get(id)
        if seen is None or seen.stamp != stamp:
            folder = seen.folder if seen is not None and seen.stamp[0] == stamp[0] else RunFolder(path)
            seen = self._seen[id] = _SeenRun(folder, folder.read_status(), last_record(path, 0), stamp)
        return seen

    def _close_idle(self) -> None:
        now = time.monotonic()
        for id, (reader, asked) in list(self._readers.items()):
            if now - asked > _IDLE_SECONDS or (len(self._readers) > _IDLE_READERS and now - asked > 1.0):
                del self._readers[id]
                reader.close()


def live_tokens() -> dict[str, str]:
    """Return token -> id of each running cluster on this host."""
    return {
        state.token: folder.name
        for folder, state in known_clusters()
        if state is not None and not isinstance(state, ClusterError) and state.running
    }


def _is_there(path: Path) -> bool:
    """Return whether the path exists; True if that cannot be checked, so that the reader gets the permission error."""
    try:
        return path.exists()
    except PermissionError:
        return True


def _closed(parent: Path) -> list[Path]:
    """Return the folders in `parent` that this server may not open and that may be runs, or `parent` itself."""
    try:
        folders = [Path(entry.path) for entry in os.scandir(parent) if is_folder(entry)]
    except PermissionError:
        return [parent]
    except OSError:
        return []
    return [folder for folder in folders if not os.access(folder, os.X_OK, effective_ids=_EFFECTIVE)]


_EFFECTIVE = os.access in os.supports_effective_ids


def _stamp(path: Path) -> object:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
