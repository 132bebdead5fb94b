"""Background save: the thread, its state, and the agreement between ranks without a collective.

Ranks communicate through files in the hidden folder:

1. Each rank writes `rank-<r>.json` after its part is done or has failed.
2. Rank 0 waits for all reports. It renames the folder, or writes `failed.json`.
3. The other ranks wait for either.

No rank waits for a process that has ended (on the same host), or for a removed folder.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Thread
from typing import Any

from speedlab.comm.shared.memfd import host_identity
from speedlab.comm.shared.shared_tensors import PeerProcess
from speedlab.telemetry.checkpoint_index import CheckpointError

_FAILED = "failed.json"
_REMOVED = "{}: was removed while it was written"
_PATIENCE_SECONDS = 1800.0
"""How long a rank that has finished its part waits for the others."""
_POLL_SECONDS = 0.01


class Saving:
    """A background save. Its thread is not a daemon: the interpreter waits for it at exit."""

    def __init__(self, path: Path, nbytes: int, work: Callable[[], None]) -> None:
        self.path = path
        self.bytes = nbytes
        """Bytes of the tensors of all ranks together."""
        self.seconds: float | None = None
        """Duration; None until the save is done."""
        self.error: CheckpointError | None = None
        self._work = work
        self._thread = Thread(target=self._run, name=f"speedlab-save-{path.name}", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        start = time.perf_counter()
        try:
            self._work()
        except CheckpointError as error:
            self.error = error
        except Exception as error:  # Any error: `wait` raises it.
            self.error = CheckpointError(f"{self.path}: was not saved: {type(error).__name__}: {error}")
        finally:
            self._work = lambda: None  # Free the copies of all tensors.
            self.seconds = time.perf_counter() - start

    @property
    def done(self) -> bool:
        """Return whether the save has ended, with or without `error`; never blocks."""
        return not self._thread.is_alive()

    def wait(self, timeout_seconds: float | None = None) -> Path:
        """Wait for the end.

        Args:
            timeout_seconds: Longest wait; None without a limit.

        Returns:
            The path of the checkpoint.

        Raises:
            CheckpointError: If the save failed.
            TimeoutError: If the save is still running.
        """
        self.join(timeout_seconds)
        if not self.done:
            raise TimeoutError(f"{self.path} is still being saved after {timeout_seconds} s")
        if self.error is not None:
            raise self.error
        return self.path

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait for the end, with any result.

        Args:
            timeout_seconds: Longest wait; None without a limit.
        """
        self._thread.join(timeout_seconds)


# ---- reports ---------------------------------------------------------------------------------------------------------


def report_file(hidden: Path, rank: int) -> Path:
    """Return the path of a rank's report.

    Args:
        hidden: The hidden folder of the save.
        rank: The rank.
    """
    return hidden / f"rank-{rank}.json"


def write_report(file: Path, report: dict[str, Any]) -> None:
    """Write a report atomically, because a peer may read it at any time.

    Args:
        file: The path.
        report: JSON content.
    """
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    os.replace(partial, file)


def take_reports(hidden: Path, size: int) -> list[dict[str, Any]]:
    """Read all ranks' reports, which must exist, and remove them.

    Args:
        hidden: The hidden folder of the save.
        size: Number of ranks.

    Returns:
        The reports in order of ranks.
    """
    reports = []
    for rank in range(size):
        file = report_file(hidden, rank)
        reports.append(json.loads(file.read_text()))
        file.unlink()
    return reports


def whose() -> list[Any]:
    """Return [host, process id], with which peers check whether this process has ended."""
    return [host_identity(), os.getpid()]


def peers_of(reported: Mapping[int, list[Any]]) -> dict[int, PeerProcess]:
    """Return the processes of other ranks on this host, by rank.

    Args:
        told: The result of `whose` on each rank.

    Raises:
        CheckpointError: If one has already ended.
    """
    peers = {}
    for rank, (host, pid) in reported.items():
        if host == host_identity() and pid != os.getpid():
            try:
                peers[rank] = PeerProcess(pid)
            except ProcessLookupError:
                raise CheckpointError(f"the process of rank {rank} has ended") from None
    return peers


def await_reports(hidden: Path, size: int, peers: Mapping[int, PeerProcess] | None = None) -> None:
    """Wait until every rank has written its report.

    Args:
        hidden: The hidden folder of the save.
        size: Number of ranks.
        peers: Processes to check, by rank.

    Raises:
        CheckpointError: As soon as a rank reports a failure, or a process has ended without a report.
    """
    missing = set(range(size))
    end = time.monotonic() + _PATIENCE_SECONDS
    while missing:
        ended = _ended(peers, missing)
        if not hidden.exists():
            raise CheckpointError(_REMOVED.format(hidden))
        for rank in sorted(missing):
            file = report_file(hidden, rank)
            if file.exists():
                problem = json.loads(file.read_text()).get("error")
                if problem is not None:
                    raise CheckpointError(problem)
                missing.discard(rank)
            elif rank in ended:
                raise CheckpointError(f"{hidden}: the process of rank {rank} ended before its part was written")
        if missing and time.monotonic() > end:
            ranks = ", ".join(map(str, sorted(missing)))
            raise CheckpointError(f"{hidden}: rank {ranks} did not write its part in {_PATIENCE_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS if missing else 0)


def _ended(peers: Mapping[int, PeerProcess] | None, ranks: Iterable[int]) -> set[int]:
    """Return ranks whose process has ended. Ask before reading reports: a process may write its report, then end."""
    return {rank for rank in ranks if peers and rank in peers and peers[rank].ended}


def tell_failed(hidden: Path, rank: int, problem: str) -> None:
    """Report that this rank's part failed, so that no rank waits for it.

    Args:
        hidden: The hidden folder of the save.
        rank: This rank.
        problem: The reason.
    """
    if rank == 0:
        give_up(hidden, problem)
    else:
        # First free space: a full disk could not store the report.
        report_file(hidden, rank).with_suffix(".safetensors").unlink(missing_ok=True)
        write_report(report_file(hidden, rank), {"error": problem})


def give_up(hidden: Path, problem: str) -> None:
    """Free space, and report to the other ranks that the save failed. The next save removes this note.

    Args:
        hidden: The hidden folder of the save.
        problem: The reason.
    """
    for file in hidden.glob("*.safetensors"):
        file.unlink(missing_ok=True)
    write_report(hidden / _FAILED, {"error": problem})


def given_up(hidden: Path) -> bool:
    """Return whether a save has failed.

    Args:
        hidden: The hidden folder of the save.
    """
    return (hidden / _FAILED).exists()


def await_outcome(hidden: Path, target: Path, peers: Mapping[int, PeerProcess] | None = None) -> None:
    """Wait until rank 0 has renamed the folder.

    Args:
        hidden: The hidden folder of the save.
        target: The final name.
        peers: Processes to check, by rank.

    Raises:
        CheckpointError: If rank 0 gave up, or its process has ended.
    """
    end = time.monotonic() + _PATIENCE_SECONDS
    while True:
        ended, there = _ended(peers, [0]), hidden.exists()
        if target.exists():
            return
        if given_up(hidden):
            raise CheckpointError(json.loads((hidden / _FAILED).read_text())["error"])
        if ended:
            raise CheckpointError(f"{hidden}: the process of rank 0 ended before it was complete")
        if not there:
            raise CheckpointError(_REMOVED.format(hidden))
        if time.monotonic() > end:
            raise CheckpointError(f"{hidden}: rank 0 did not complete it in {_PATIENCE_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)
