"""How busy engines are: the CPU time that their processes take, and their GPUs as NVML tells it.

Measured by who looks, between one look and the next: nothing runs while nobody looks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

import psutil

import speedlab.hardware as hardware

AGAIN_SECONDS = 0.5
"""Looks that follow each other faster, as of several pages, get what the one before got: so short a time tells
little."""
STALE_SECONDS = 30.0
"""After so long without a look the next one begins anew: nobody wants to know the mean of an hour."""


class Load(NamedTuple):
    """How busy an engine is; None where nobody knows, as at the first look."""

    cpu_cores: float | None = None
    """Cores' worth of CPU time that its process took since the look before."""
    gpu_share: float | None = None
    """Share of the last moments in which its GPU computed, 0 to 1."""


class _LastSample(NamedTuple):
    started: float
    at: float
    cpu_seconds: float
    load: Load


class Loads:
    """Of the processes of one host. Any thread may ask."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[int, _LastSample] = {}
        """By process id."""
        self._lock = threading.Lock()

    def of(self, process: psutil.Process) -> Load:
        """How busy an engine's process is, and its GPU. Raises psutil.NoSuchProcess where it has ended."""
        with self._lock:
            now = self._clock()
            self._seen = {pid: seen for pid, seen in self._seen.items() if now - seen.at < STALE_SECONDS}
            before = self._seen.get(process.pid)
            if before is not None and before.started != process.create_time():
                before = None  # The number is another process's by now.
            if before is not None and now - before.at < AGAIN_SECONDS:
                return before.load
            times = process.cpu_times()
            seconds = times.user + times.system
            cores = None if before is None else max(0.0, seconds - before.cpu_seconds) / (now - before.at)
            uuid = process.environ().get("CUDA_VISIBLE_DEVICES", "")
            load = Load(cores, hardware.gpu_share(uuid) if uuid else None)
            self._seen[process.pid] = _LastSample(process.create_time(), now, seconds, load)
            return load
