"""Phase timer: the time of a step by phase, measured without a sync."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.autograd.profiler import record_function

from cuda_ops.kernel_usage import meter
from speedlab.comm import CommStats
from speedlab.comm.transfers import CommCounts
from speedlab.engine.memory_ledger import MemoryMarks
from speedlab.telemetry.records import MemoryMark


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """The costs of a step on this rank. The fields are those of the step record."""

    seconds: float
    phases: dict[str, float]
    sent_bytes: dict[str, int]
    moved_bytes: dict[str, int]
    kernels: dict[str, dict[str, float]]
    sent_through: dict[str, dict[str, int]] = field(default_factory=dict)
    exchange: dict[str, float] = field(default_factory=dict)
    memory: list[MemoryMark] = field(default_factory=list)


class PhaseClock:
    """A clock of seconds by phase since the last `take`: wall time on CPUs, events on a GPU.

    Waits for collectives are subtracted from their phase and shown as 'communication'; waits for host memory or disk as
    'offload'. GPU times are read after their events have passed, so they may appear in the next step's record.
    """

    def __init__(self, traffic: CommStats, device: torch.device) -> None:
        self._traffic, self._device = traffic, device
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, str, torch.cuda.Event, torch.cuda.Event]] = []
        """(phase, enclosing phase, begin, end)."""
        self._since = time.perf_counter()
        self._marks = MemoryMarks(device)
        self._marks.begin()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time of the block in a phase, and subtract it from the enclosing phase.

        Args:
            name: Name of the phase.
        """
        outer, self._traffic.phase = self._traffic.phase, name
        try:
            with record_function(f"speedlab::{name}"):
                if self._device.type != "cuda":
                    start = time.perf_counter()
                    yield
                    self._count(name, outer, time.perf_counter() - start)
                else:
                    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    before.record()
                    yield
                    after.record()
                    self._events.append((name, outer, before, after))
            self._marks.note(name)
        finally:
            self._traffic.phase = outer

    def _count(self, name: str, outer: str, seconds: float) -> None:
        self._seconds[name] += seconds
        if outer:
            # Phases are exclusive, so the enclosing phase does not count this time.
            self._seconds[outer] -= seconds

    def begin(self) -> None:
        """Start a step, and drop measurements outside any step."""
        self._marks.drop()
        self.take()

    def take(self) -> StepCosts:
        """Return the measurements since the last call."""
        late = []
        for name, outer, before, after in self._events:
            if after.query():
                self._count(name, outer, before.elapsed_time(after) / 1e3)
            else:
                late.append((name, outer, before, after))
        self._events = late
        counted = self._traffic.take()
        waits = Counter(counted.peer_seconds) + Counter(counted.place_seconds)
        # A wait may be known before its phase's time; it is subtracted when that time arrives.
        to_come = {name for names in late for name in names[:2] if name}
        left = {
            name: self._seconds[name] - waits.get(name, 0.0) for name in {*self._seconds, *(waits.keys() & to_come)}
        }
        phases = {name: max(0.0, seconds) for name, seconds in left.items()} | {
            "communication": sum(counted.peer_seconds.values())
        }
        if offload := sum(counted.place_seconds.values()):
            phases["offload"] = offload
        self._seconds = defaultdict(float, {n: seconds for n, seconds in left.items() if seconds < 0 and n in to_come})
        now = time.perf_counter()
        wall, self._since = now - self._since, now
        kernels = {
            name: {"calls": use.calls, "bytes": use.nbytes, "seconds": use.seconds}
            for name, use in meter.take().items()
        }
        memory = self._marks.take()
        self._marks.begin()
        return StepCosts(
            seconds=wall,
            memory=memory,
            phases=phases,
            sent_bytes=counted.sent_bytes,
            sent_through=counted.sent_through,
            moved_bytes=counted.moved_bytes,
            exchange=_exchange(counted),
            kernels=kernels,
        )


def _exchange(counted: CommCounts) -> dict[str, float]:
    """Return the figures of compressed communication for the step record; {} without any."""
    if not counted.float32_bytes:
        return {}
    return {"compressed": 1.0, "sent_bytes": counted.compressed_bytes, "float32_bytes": counted.float32_bytes}
