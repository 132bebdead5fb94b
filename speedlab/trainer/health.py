"""Two health checks of a run: a slow offload disk, and a supervisor that has ended.

- `SlowDisk` measures the first steps and warns once if they wait for the disk. The run continues.
- `Supervised` detects that the cluster's supervisor has ended. Nobody would notice a later failure of the run, so the
  run pauses after its current step until the next supervisor starts.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from speedlab.config import OffloadConfig
from speedlab.engine.phase_timer import StepCosts
from speedlab.planner.time.offload import LIMITING_SHARE

_PASSED_BY, _MEASURED = 1, 3
"""Number of skipped and of measured steps. The first step creates the files, learns the order of accesses and is
traced, so it is not measured.
"""


class SlowDisk:
    """Measures the steps of one rank, and starts again after each change of the offload configuration."""

    def __init__(self) -> None:
        self._offload: OffloadConfig | None = None
        self._steps = 0
        self._seconds = self._waited = 0.0

    def after_step(self, offload: OffloadConfig, costs: StepCosts) -> str:
        """Count one step and return a warning if the disk limits the speed.

        If states are offloaded to host and disk, waits for both are counted.

        Args:
            offload: Offload configuration of the step.
            costs: Measured times of the step.

        Returns:
            The warning, after the last measured step; otherwise "".
        """
        if offload != self._offload:
            self._offload, self._steps, self._seconds, self._waited = offload, 0, 0.0, 0.0
        self._steps += 1
        if "disk" not in (offload.optimizer, offload.parameters) or self._steps <= _PASSED_BY:
            return ""
        self._seconds += costs.seconds
        self._waited += costs.phases.get("offload", 0.0)
        if self._steps != _PASSED_BY + _MEASURED or self._waited < LIMITING_SHARE * self._seconds:
            return ""
        host = "the host and " if "host" in (offload.optimizer, offload.parameters) else ""
        return (
            f"offload: steps wait {self._waited / _MEASURED:.2g} s of {self._seconds / _MEASURED:.2g} s "
            f"({self._waited / self._seconds:.0%}, measured) for {host}the disk with states, which limits them; the "
            "run goes on. Larger micro-batches, offload.folder on a faster disk, or offload.optimizer 'host' would "
            "wait less"
        )


SUPERVISOR_LOCK = "SPEEDLAB_SUPERVISOR_LOCK"
"""Environment variable with the path of a file that the cluster's supervisor keeps locked while it runs. Locks do not
reach other hosts. There the host's agent creates the file when it loses contact with the supervisor.
"""

LOOK_SECONDS = 0.5
"""Shortest time between two checks."""
PATIENCE_SECONDS = 2.0
"""How long the supervisor may be absent, because the next one may be starting."""


class Supervised:
    """Checks the supervisor's lock. Without a cluster, the supervisor never counts as ended."""

    def __init__(self) -> None:
        named = os.environ.get(SUPERVISOR_LOCK)
        self._lock = Path(named) if named else None
        self._look_at = 0.0
        self._gone_since: float | None = None

    def ended(self) -> bool:
        """Return whether the supervisor has been absent for PATIENCE_SECONDS."""
        now = time.monotonic()
        if self._lock is None or now < self._look_at:
            return False
        self._look_at = now + LOOK_SECONDS
        if self._is_held(self._lock):
            self._gone_since = None
            return False
        self._gone_since = self._gone_since if self._gone_since is not None else now
        return now - self._gone_since >= PATIENCE_SECONDS

    @staticmethod
    def _is_held(path: Path) -> bool:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return True  # No file: the cluster has no supervisor, is being removed, or its agent still has contact.
        try:
            # A shared lock fails only while the supervisor holds its exclusive one; engines do not block each other.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False
