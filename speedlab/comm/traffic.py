"""What collectives cost: bytes sent by name, bytes of buffers, and the time a rank really waited."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

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
    wait_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    def waited(self, wait: Callable[[], None], device: torch.device) -> None:
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


class Pending:
    """A collective under way. `wait` must be called once; then its result is where it was asked for."""

    def __init__(
        self,
        finish: Callable[[], None] | None,
        traffic: Traffic,
        device: torch.device,
        *,
        over: Callable[[], bool] = lambda: False,
    ) -> None:
        """`over`: whether it has ended by itself already, where that can be told without waiting."""
        self._finish, self._traffic, self._device = finish, traffic, device
        self._over = over

    @property
    def over(self) -> bool:
        """Whether there is nothing left to wait for, as far as can be told without waiting."""
        return self._finish is None or self._over()

    def wait(self) -> None:
        if self._finish is not None:
            self._traffic.waited(self.finish_uncounted, self._device)

    def finish_uncounted(self) -> None:
        """The same without counting the time, for a wait that is part of another one."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
