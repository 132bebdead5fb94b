"""What collectives cost: bytes sent by name, bytes of buffers, and the time a rank really waited."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class BufferMeter:
    """Bytes of communication buffers that are alive, and the most there were since the last `take_peak`."""

    live_bytes: int = 0
    peak_bytes: int = 0

    def add(self, nbytes: int) -> None:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def take_peak(self) -> int:
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak


@dataclass
class Traffic:
    """Bytes this rank sent, by collective, and the seconds it waited, by phase of the step, since the last `take`."""

    phase: str = ""
    """The phase of the step that waits are counted in; set by whoever times phases."""
    buffers: BufferMeter = field(default_factory=BufferMeter)
    sent_bytes: Counter[str] = field(default_factory=Counter)
    link_bytes: Counter[str] = field(default_factory=Counter)
    """Bytes since this object was made, by what they went through: shared memory, gloo, nccl, host copies."""
    wait_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def sent(self, name: str, link: str, nbytes: int) -> None:
        """Count what this rank sends: under the collective's name, and under what it goes through."""
        if nbytes:
            if name:
                self.sent_bytes[name] += nbytes
            self.link_bytes[link] += nbytes

    def waited(self, wait: Callable[[], Any], device: torch.device) -> None:
        """Run `wait` and count its time: by the clock on CPUs, by a pair of events on a GPU, which nothing waits
        for."""
        if device.type != "cuda":
            start = time.perf_counter()
            wait()
            self.wait_seconds[self.phase] += time.perf_counter() - start
            return
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        wait()
        after.record()
        self._events.append((self.phase, before, after))

    def take(self) -> tuple[dict[str, int], dict[str, float]]:
        """What was counted, as (bytes by collective, seconds by phase); the counters start again.

        GPU times are added once their events have passed; those that have not are left for the next call.
        """
        late = []
        for phase, before, after in self._events:
            if after.query():
                self.wait_seconds[phase] += before.elapsed_time(after) / 1e3
            else:
                late.append((phase, before, after))
        self._events = late
        taken = dict(self.sent_bytes), dict(self.wait_seconds)
        self.sent_bytes, self.wait_seconds = Counter(), defaultdict(float)
        return taken
