"""A save that goes on while training does: its thread, its state, and how ranks agree without a collective.

Ranks tell each other through the hidden folder: each writes `rank-<r>.json` when its part is done or has failed; the
first one waits for all of them, and gives the folder its name, or writes `failed.json`; the others wait for either.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

from speedlab.telemetry.checkpoints import CheckpointError

_FAILED = "failed.json"
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


def await_reports(hidden: Path, size: int) -> None:
    """Wait until every rank has written its report. Raises CheckpointError as soon as one says that it failed."""
    missing = set(range(size))
    end = time.monotonic() + _PATIENCE_SECONDS
    while missing:
        for rank in sorted(missing):
            file = report_file(hidden, rank)
            if file.exists():
                problem = json.loads(file.read_text()).get("error")
                if problem is not None:
                    raise CheckpointError(problem)
                missing.discard(rank)
        if missing and time.monotonic() > end:
            ranks = ", ".join(map(str, sorted(missing)))
            raise CheckpointError(f"{hidden}: rank {ranks} did not write its part in {_PATIENCE_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS if missing else 0)


def give_up(hidden: Path, problem: str) -> None:
    """Tell the others that there will be no checkpoint, and make room; the note goes with the next save."""
    write_report(hidden / _FAILED, {"error": problem})
    for file in hidden.glob("*.safetensors"):
        file.unlink(missing_ok=True)


def given_up(hidden: Path) -> bool:
    return (hidden / _FAILED).exists()


def await_outcome(hidden: Path, target: Path) -> None:
    """Wait until the first rank has given the folder its name. Raises CheckpointError when it gave up."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not target.exists():
        if given_up(hidden):
            raise CheckpointError(json.loads((hidden / _FAILED).read_text())["error"])
        if time.monotonic() > end:
            raise CheckpointError(f"{hidden}: rank 0 did not complete it in {_PATIENCE_SECONDS:.0f} s")
        time.sleep(_POLL_SECONDS)
