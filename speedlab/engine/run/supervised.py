"""Whether the cluster's supervisor is there: a run whose supervisor has ended would fail without anybody hearing of it,
so it stops behind its step and waits for the next one."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

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
