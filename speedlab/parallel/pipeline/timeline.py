"""What a pipeline rank did in a step, in spans that do not overlap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from speedlab.telemetry.records import Span


class _Label(NamedTuple):
    action: str
    stage: int
    micro_batch: int


class PhaseTimeline:
    """Marks of when a rank turned to something else: by the clock on CPUs, by events on a GPU, which nothing waits
    for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._under_way: list[_Label] = []
        self._marks: list[tuple[float | torch.cuda.Event, _Label | None]] = []
        self._last: list[Span] = []
        self.began = 0.0
        """Seconds since the epoch."""

    def begin(self) -> None:
        """Start anew; spans are counted from here."""
        self._keep_what_has_passed()
        self._under_way.clear()
        self._marks = []
        self.began = time.time()
        self._mark(None)

    @contextmanager
    def span(self, action: str, stage: int = -1, micro_batch: int = -1) -> Iterator[None]:
        """The block is `action`; what is around it goes on afterwards, as a span of its own."""
        self._under_way.append(_Label(action, stage, micro_batch))
        self._mark(self._under_way[-1])
        try:
            yield
        finally:
            if self._under_way:
                self._under_way.pop()
            self._mark(self._under_way[-1] if self._under_way else None)

    def _mark(self, label: _Label | None) -> None:
        stamp: float | torch.cuda.Event = time.perf_counter()
        if self._device.type == "cuda":
            stamp = torch.cuda.Event(enable_timing=True)
            stamp.record()
        self._marks.append((stamp, label))

    def spans(self) -> list[Span]:
        """The spans of the last step, in order; on a GPU that has not come to its end, those of the step before."""
        self._keep_what_has_passed()
        return self._last

    def _keep_what_has_passed(self) -> None:
        """Marks become spans once the last of them has passed."""
        if not self._marks:
            return
        origin, last = self._marks[0][0], self._marks[-1][0]
        if isinstance(last, torch.cuda.Event) and not last.query():
            return
        self._last = [
            Span(*label, _between(origin, start), _between(start, end))
            for (start, label), (end, _) in zip(self._marks, self._marks[1:], strict=False)
            if label is not None
        ]


def _between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        return start.elapsed_time(end) / 1e3
    assert not isinstance(end, torch.cuda.Event)
    return end - start
