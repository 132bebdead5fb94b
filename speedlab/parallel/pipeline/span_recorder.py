"""The timeline of a pipeline rank in a step: spans that do not overlap."""

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
    """Records when a rank changes its activity: host clock on CPUs, CUDA events on a GPU. No recording waits for the
    GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._under_way: list[_Label] = []
        self._marks: list[tuple[float | torch.cuda.Event, _Label | None]] = []
        self._last: list[Span] = []
        self.began = 0.0
        """Start of the timeline, in seconds since the epoch."""

    def begin(self) -> None:
        """Start a new timeline; span times are relative to this call."""
        self._keep_what_has_passed()
        self._under_way.clear()
        self._marks = []
        self.began = time.time()
        self._mark(None)

    @contextmanager
    def span(self, action: str, stage: int = -1, micro_batch: int = -1) -> Iterator[None]:
        """Record the block as `action`. Afterwards the outer action continues as a new span.

        Args:
            action: Name of the activity.
            stage: Pipeline stage; -1: none.
            micro_batch: Number of the micro-batch; -1: none.
        """
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
        """Return the spans of the last step, in order. If a GPU has not finished this step, return those of the step
        before.
        """
        self._keep_what_has_passed()
        return self._last

    def _keep_what_has_passed(self) -> None:
        """Convert marks to spans, if the last mark has passed."""
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
