"""How busy engines are: CPU time of their processes, and utilization of their GPUs from NVML.

Values are computed from one look to the next. Nothing runs in between.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

import speedlab.hardware as hardware

AGAIN_SECONDS = 0.5
"""A look that follows sooner, for example from a second page, gets the last value: the interval is too short to
measure.
"""
STALE_SECONDS = 30.0
"""After this time without a look, measuring starts again, because a mean over a long time is of no use."""


class Load(NamedTuple):
    """How busy an engine is; None if unknown, as at the first look."""

    cpu_cores: float | None = None
    """CPU time of its process per second since the last look, in cores."""
    gpu_share: float | None = None
    """Share of the recent past in which its GPU computed, 0 to 1."""


class _LastSample(NamedTuple):
    started: float
    at: float
    cpu_seconds: float
    load: Load


class Loads:
    """Load of the processes of one host. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: returns the time in seconds."""
        self._clock = clock
        self._seen: dict[int, _LastSample] = {}
        """Last sample by process id."""
        self._lock = threading.Lock()

    def of(self, process: psutil.Process) -> Load:
        """Return how busy an engine's process and its GPU are.

        Args:
            process: Process of an engine.

        Raises:
            psutil.NoSuchProcess: If the process has ended.
        """
        with self._lock:
            now = self._clock()
            self._seen = {pid: seen for pid, seen in self._seen.items() if now - seen.at < STALE_SECONDS}
            before = self._seen.get(process.pid)
            if before is not None and before.started != process.create_time():
                before = None  # The process id was reused.
            if before is not None and now - before.at < AGAIN_SECONDS:
                return before.load
            times = process.cpu_times()
            seconds = times.user + times.system
            cores = None if before is None else max(0.0, seconds - before.cpu_seconds) / (now - before.at)
            uuid = process.environ().get("CUDA_VISIBLE_DEVICES", "")
            load = Load(cores, hardware.gpu_share(uuid) if uuid else None)
            self._seen[process.pid] = _LastSample(process.create_time(), now, seconds, load)
            return load
