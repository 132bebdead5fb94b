"""Count the kernels of this process: calls, bytes and seconds by name, since the last read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

import torch


@dataclass
class KernelUse:
    """Uses of one kernel. `nbytes` is the minimum that the kernel reads and writes; `seconds` is time on its device."""

    calls: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class KernelMeter:
    """Counts the kernels of this process, in all threads."""

    def __init__(self) -> None:
        self._uses: dict[str, KernelUse] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._lock = Lock()

    @contextmanager
    def record(self, name: str, nbytes: int, device: torch.device) -> Iterator[None]:
        """Count the kernel in the context. Uses the clock on CPUs, and a pair of events without waiting on GPUs.

        Args:
            name: Name of the kernel.
            nbytes: Bytes that the kernel reads and writes at least.
            device: Device of the kernel.
        """
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._add(name, 1, nbytes, time.perf_counter() - start)
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        yield
        after.record()
        self._add(name, 1, nbytes, 0.0)
        with self._lock:
            self._events.append((name, before, after))

    def take(self) -> dict[str, KernelUse]:
        """Return the counts and restart them. GPU times whose events are still pending are counted in a later call."""
        with self._lock:
            events, self._events = self._events, []
        for name, before, after in events:
            if after.query():
                self._add(name, 0, 0, before.elapsed_time(after) / 1e3)
            else:
                with self._lock:
                    self._events.append((name, before, after))
        with self._lock:
            uses, self._uses = self._uses, {}
        return uses

    def _add(self, name: str, calls: int, nbytes: int, seconds: float) -> None:
        with self._lock:
            use = self._uses.setdefault(name, KernelUse())
            use.calls += calls
            use.nbytes += nbytes
            use.seconds += seconds


meter = KernelMeter()
"""The meter of this process. Global, because kernels have no other object to report to."""
