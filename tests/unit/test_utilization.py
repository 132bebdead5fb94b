"""How busy engines are, of made-up processes under a made-up clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from speedlab import hardware
from speedlab.cluster.worker.utilization import Load, Loads


class Process:
    """As much of psutil's as is used; counts how often its times are read."""

    def __init__(self, pid: int, started: float = 1.0, gpu: str = "") -> None:
        self.pid, self._started, self._gpu = pid, started, gpu
        self.seconds, self.reads = 0.0, 0

    def create_time(self) -> float:
        return self._started

    def cpu_times(self) -> Any:
        self.reads += 1
        return SimpleNamespace(user=0.75 * self.seconds, system=0.25 * self.seconds)

    def environ(self) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": self._gpu}


def test_cpu_time_between_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    loads: Any = Loads(clock=lambda: now)
    monkeypatch.setattr(hardware, "gpu_share", {"GPU-a": 0.87}.get)
    process = Process(7)
    assert loads.of(process) == Load(None, None)  # There is nothing to compare with yet.

    now, process.seconds = 102.0, 3.0
    assert loads.of(process) == Load(1.5, None)
    # Another page asks a moment later: the same, and nothing is read.
    now, process.seconds, reads = 102.4, 3.4, process.reads
    assert (loads.of(process), process.reads) == (Load(1.5, None), reads)
    now, process.seconds = 104.0, 3.5
    assert loads.of(process) == Load(0.25, None)

    # A process of the same number that started later has nothing to do with it, nor has what was long ago.
    other = Process(7, started=103.0, gpu="GPU-a")
    now = 105.0
    assert loads.of(other) == Load(None, 0.87)
    now, other.seconds = 200.0, 50.0
    assert loads.of(other) == Load(None, 0.87)
    now = 202.0
    assert loads.of(other) == Load(0.0, 0.87)
