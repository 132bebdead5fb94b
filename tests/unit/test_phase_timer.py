"""Times of a step by phase, with events of a GPU that pass when the test says so."""

from __future__ import annotations

import time

import pytest
import torch

from speedlab.comm import CommStats, Transfer
from speedlab.engine import memory_ledger, phase_timer
from speedlab.engine.memory_ledger import MemoryMarks, allocated_bytes
from speedlab.engine.phase_timer import PhaseClock


class Event:
    """One of a made-up GPU: `now` is its time in milliseconds, `passed` until when it has come."""

    now, passed = 0.0, 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = -1.0

    def record(self) -> None:
        self.at = Event.now

    def query(self) -> bool:
        return self.at <= Event.passed

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


@pytest.fixture
def gpu_clock(monkeypatch: pytest.MonkeyPatch) -> tuple[PhaseClock, CommStats]:
    monkeypatch.setattr(phase_timer.torch.cuda, "Event", Event)
    Event.now = Event.passed = 0.0
    traffic, device = CommStats(), torch.device("cuda")
    return PhaseClock(traffic, device), traffic


def test_a_wait_that_is_known_before_its_phase(gpu_clock) -> None:
    """The optimizer phase of 10 ms, with a wait of 4 ms in it, of which only the wait has passed at the first look: the
    phase comes with the second, without the wait, and nothing is lost."""
    phases, traffic = gpu_clock

    def wait() -> None:
        Event.now += 4.0

    with phases.phase("optimizer"):
        Event.now = 2.0
        traffic.waited(wait, torch.device("cuda"))
        Event.now = 10.0
    Event.passed = 7.0
    first = phases.take().phases
    Event.passed = 10.0
    second = phases.take().phases
    assert first["communication"] == pytest.approx(4e-3)
    assert first["optimizer"] == 0.0
    assert second["optimizer"] == pytest.approx(6e-3)
    assert second["communication"] == 0.0
    assert phases.take().phases.get("optimizer", 0.0) == 0.0


def test_a_wait_for_a_place_is_offload_and_not_communication(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def passes(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    traffic, cpu = CommStats(), torch.device("cpu")
    phases = PhaseClock(traffic, cpu)
    phases.take()
    with phases.phase("optimizer"):
        passes(0.005)
        Transfer(lambda: passes(0.02), traffic, cpu, link="disk read", nbytes=64).wait()
        Transfer(lambda: passes(0.01), traffic, cpu, link="gloo", nbytes=8).wait()
    costs = phases.take()
    assert costs.phases["offload"] == pytest.approx(0.02)
    assert costs.phases["communication"] == pytest.approx(0.01)
    assert costs.phases["optimizer"] == pytest.approx(0.005)
    assert costs.moved_bytes == {"disk read": 64}
    assert "offload" not in phases.take().phases


def test_waits_outside_all_phases_are_communication_only(gpu_clock) -> None:
    phases, traffic = gpu_clock
    traffic.waited(lambda: setattr(Event, "now", 3.0), torch.device("cuda"))
    Event.passed = 3.0
    assert phases.take().phases == {"communication": pytest.approx(3e-3)}
    assert phases.take().phases == {"communication": 0.0}


def test_memory_is_marked_at_the_ends_of_phases_in_one_step_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, held = [10.0], iter(range(1, 100))

    def read(device: torch.device) -> int:
        now[0] += 1e-5
        return next(held)

    monkeypatch.setattr(memory_ledger, "allocated_bytes", read)
    marks = MemoryMarks(torch.device("cpu"), lambda: now[0], lambda: now[0])

    def step(*phases: str) -> list[tuple[str, int]]:
        marks.begin()
        for phase in phases:
            now[0] += 0.1
            marks.note(phase)
        return [(mark.phase, mark.bytes) for mark in marks.take()]

    assert step("forward", "backward") == [("start", 1), ("forward", 2), ("backward", 3)]
    assert step("forward") == [], "the second is not over"
    now[0] += 1.0
    marks.begin()
    assert marks.take()[0].seconds == 0.0
    now[0] += 1.0
    # A heap that is counted slowly: its step ends there, and the next one waits 400 times as long.
    monkeypatch.setattr(memory_ledger, "allocated_bytes", lambda device: now.append(now.pop() + 0.01) or 7)
    assert step("forward", "backward") == [("start", 7)]
    now[0] += 2.0
    assert step("forward") == []
    now[0] += 2.0
    assert step() == [("start", 7)]


def test_what_is_allocated_on_a_cpu_is_counted_to_the_byte_of_a_large_tensor() -> None:
    before = allocated_bytes(torch.device("cpu"))
    if before == 0:
        pytest.skip("the C library counts no heap")
    tensor = torch.zeros(4 << 20, dtype=torch.uint8)
    assert (4 << 20) <= allocated_bytes(torch.device("cpu")) - before < (5 << 20)
    del tensor
    assert allocated_bytes(torch.device("cpu")) - before < (1 << 20)


def test_a_clock_gives_the_marks_with_its_step() -> None:
    phases = PhaseClock(CommStats(), torch.device("cpu"))
    with phases.phase("forward"), phases.phase("data"):
        pass
    assert [mark.phase for mark in phases.take().memory] == ["start", "data", "forward"]
    assert phases.take().memory == []


def test_marks_are_those_of_steps_and_not_of_what_is_between_them() -> None:
    """What is between two steps, as a save, begins first once a second is over, and would be marked in their place."""
    phases, now = PhaseClock(CommStats(), torch.device("cpu")), [10.0]
    phases._marks = MemoryMarks(torch.device("cpu"), lambda: now[0], lambda: 0.0)

    def step(seconds: float) -> bool:
        now[0] += 0.01
        phases.begin()
        with phases.phase("forward"):
            now[0] += seconds
        return [mark.phase for mark in phases.take().memory] == ["start", "forward"]

    assert [step(3.0) for _ in range(4)] == [True] * 4
    assert [step(0.3) for _ in range(8)] == [True, False, False, False] * 2
