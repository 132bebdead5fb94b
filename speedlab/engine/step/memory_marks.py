"""Memory over the time of a step: what the allocator has given out at the ends of the step's phases.

Nothing is made to wait: the allocator's own counters are read, on the host. On a GPU they are ahead of the device, as
the host is. Only some steps are marked, one in a second at most, and so few that reading costs less than 1/400 of the
time.
"""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable

import torch

from speedlab.comm.shared import arena
from speedlab.telemetry.records import MemoryMark

MOST_MARKS = 128
"""Of one step; of many micro-batches the first ones are marked."""
_SECONDS = 1.0
_MOST_SECONDS = 3e-3
"""Of a processor, that reading may take in one step: a heap in very many pieces is counted slowly, and then left."""
_SPARING = 400
"""Times the time that reading took pass until the next step is marked."""


class MemoryMarks:
    """Of one rank. A step begins with `begin`, and `take` has its marks."""

    def __init__(
        self,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
        work_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """`work_clock`: tells a thread's time on its processor, which does not grow while others have that."""
        self._device, self._clock, self._work_clock = device, clock, work_clock
        self._found: list[MemoryMark] | None = None
        """None in a step that is not marked."""
        self._began = self._due = self._spent = 0.0

    def begin(self) -> None:
        """A step begins now."""
        self._began = now = self._clock()
        self._found = [] if now >= self._due else None
        self._spent = 0.0
        self.note("start")

    def note(self, phase: str) -> None:
        """A phase has ended."""
        if self._found is None or len(self._found) >= MOST_MARKS or self._spent > _MOST_SECONDS:
            return
        before = self._work_clock()
        seconds = round(self._clock() - self._began, 6)
        self._found.append(MemoryMark(phase, seconds, allocated_bytes(self._device)))
        self._spent += self._work_clock() - before

    def drop(self) -> None:
        """What has been marked since `begin` is no step's: the next one is marked in its place."""
        self._found = None

    def take(self) -> list[MemoryMark]:
        """Those of the step that ends; [] where it is not marked."""
        if self._found is None:
            return []
        self._due = self._began + max(_SECONDS, _SPARING * self._spent)
        return self._found


def allocated_bytes(device: torch.device) -> int:
    """What is given out now: CUDA: to tensors; CPU: to the process by its heap, and to it of shared memory. 0 where
    nobody counts."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    heap = _heap()
    if heap is None:
        return 0
    counted = heap()
    return counted.used + counted.mapped + arena().nbytes


class _Heap(ctypes.Structure):
    """What mallinfo2(3) tells."""

    _fields_ = [(f"other{i}", ctypes.c_size_t) for i in range(4)]  # ctypes reads it so
    _fields_ += [("mapped", ctypes.c_size_t), ("other4", ctypes.c_size_t), ("other5", ctypes.c_size_t)]
    _fields_ += [("used", ctypes.c_size_t), ("free", ctypes.c_size_t), ("top", ctypes.c_size_t)]


@functools.cache
def _heap() -> Callable[[], _Heap] | None:
    """glibc's counters, since version 2.33; None on other systems."""
    try:
        mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    mallinfo2.restype, mallinfo2.argtypes = _Heap, []
    return mallinfo2
