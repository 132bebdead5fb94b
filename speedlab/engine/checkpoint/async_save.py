"""A save that goes on while training does: its thread, its state, and how ranks agree without a collective.

Ranks tell each other through the hidden folder: each writes `rank-<r>.json` when its part is done or has failed; the
first one waits for all of them, and gives the folder its name, or writes `failed.json`; the others wait for either.
Nobody waits for a process that has ended (on the same host), nor for a folder that was removed.
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
"""How long a rank whose own part is done waits for the others."""
_POLL_SECONDS = 0.01


class Saving:
    """A save under way. The thread is no daemon: the interpreter waits for it at its end."""

    def __init__(self, path: Path, nbytes: int, work: Callable[[], None]) -> None:
        self.path = path
        self.bytes = nbytes
        """Of all ranks' tensors together."""
        self.seconds: float | None = None
        """How long it took, once it is done."""
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
        except Exception as error:  # Whatever it is, who asks for the outcome shall hear it.
            self.error = CheckpointError(f"{self.path}: was not saved: {type(error).__name__}: {error}")
        finally:
            self._work = lambda: None  # It holds the copies of all tensors.
            self.seconds = time.perf_counter() - start

    @property
    def done(self) -> bool:
        """Whether it has ended, well or with `error`; never blocks."""
        return not self._thread.is_alive()

    def wait(self, timeout_seconds: float | None = None) -> Path:
        """Wait for its end and return the checkpoint's path. Raises CheckpointError when it failed, TimeoutError when
        it is still under way."""
        self.join(timeout_seconds)
        if not self.done:
            raise TimeoutError(f"{self.path} is still being saved after {timeout_seconds} s")
        if self.error is not None:
            raise self.error
        return self.path

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait for its end, however it ends."""
        self._thread.join(timeout_seconds)


# ---- reports ---------------------------------------------------------------------------------------------------------


def report_file(hidden: Path, rank: int) -> Path:
    return hidden / f"rank-{rank}.json"


def write_report(file: Path, report: dict[str, Any]) -> None:
    """Whole or not at all: a peer may look at any time."""
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(report))
    os.replace(partial, file)


def take_reports(hidden: Path, size: int) -> list[dict[str, Any]]:
    """All ranks' reports, which are there; they are removed."""
    reports = []
    for rank in range(size):
        file = report_file(hidden, rank)
        reports.append(json.loads(file.read_text()))
        file.unlink()
    return reports


def whose() -> list[Any]:
    """What peers have to know to see whether this process has ended."""
    return [host_identity(), os.getpid()]


def peers_of(told: Mapping[int, list[Any]]) -> dict[int, PeerProcess]:
    """Those of other ranks' processes, by rank, that can be looked at from here: `told` is what `whose` gave there.

    Raises CheckpointError when one has ended already."""
    peers = {}
    for rank, (host, pid) in told.items():
        if host == host_identity() and pid != os.getpid():
            try:
                peers[rank] = PeerProcess(pid)
            except ProcessLookupError:
                raise CheckpointError(f"the process of rank {rank} has ended") from None
    return peers


def await_reports(hidden: Path, size: int, peers: Mapping[int, PeerProcess] | None = None) -> None:
    """Wait until every rank has written its report. Raises CheckpointError as soon as one says that it failed, or of
    `peers` one has ended without a report."""
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
    """To be asked before a look at what they have left: they may have written it and ended since."""
    return {rank for rank in ranks if peers and rank in peers and peers[rank].ended}


def tell_failed(hidden: Path, rank: int, problem: str) -> None:
    """Tell the others that this rank's part will not come, so that none waits for it."""
    if rank == 0:
        give_up(hidden, problem)
    else:
        # First make room: a full disk would not take the word either.
        report_file(hidden, rank).with_suffix(".safetensors").unlink(missing_ok=True)
        write_report(report_file(hidden, rank), {"error": problem})


def give_up(hidden: Path, problem: str) -> None:
    """Make room, and tell the others that there will be no checkpoint; the note goes with the next save."""
    for file in hidden.glob("*.safetensors"):
        file.unlink(missing_ok=True)
    write_report(hidden / _FAILED, {"error": problem})


def given_up(hidden: Path) -> bool:
    return (hidden / _FAILED).exists()


def await_outcome(hidden: Path, target: Path, peers: Mapping[int, PeerProcess] | None = None) -> None:
    """Wait until the first rank has given the folder its name. Raises CheckpointError when it gave up, or its process,
    one of `peers`, has ended."""
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
