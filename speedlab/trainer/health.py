"""Whether a step waits for the disk that holds states: measured in the first steps of a run, said once, and allowed.

Whether the cluster's supervisor is there: a run whose supervisor has ended would fail without anybody hearing of it,
so it stops behind its step and waits for the next one.
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
"""Steps: the first makes the files, learns what comes after what and is traced; so many behind it are measured."""


class SlowDisk:
    """Looks at the steps of one rank, anew after each change of where states lie."""

    def __init__(self) -> None:
        self._offload: OffloadConfig | None = None
        self._steps = 0
        self._seconds = self._waited = 0.0

    def after_step(self, offload: OffloadConfig, costs: StepCosts) -> str:
        """What is to be said after a step under `offload`: '' unless it is the one that ends the measurement, and the
        disk limits. Waits for the host's memory count with the disk's, where states lie in both."""
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
"""In the environment: a file that the cluster's supervisor holds locked as long as it lives. Locks do not reach other
hosts: there it is a file that is only made, by the host's agent, when that hears nothing of the supervisor."""

LOOK_SECONDS = 0.5
PATIENCE_SECONDS = 2.0
"""How long it may be gone: the next one may be starting."""


class Supervised:
    """Looks now and then; in an engine that no cluster has started, it sees nothing."""

    def __init__(self) -> None:
        named = os.environ.get(SUPERVISOR_LOCK)
        self._lock = Path(named) if named else None
        self._look_at = 0.0
        self._gone_since: float | None = None

    def ended(self) -> bool:
        """Whether the supervisor has been gone for PATIENCE_SECONDS."""
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
            return True  # A cluster that knows no supervisor or is being removed, or nobody misses the supervisor.
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False
