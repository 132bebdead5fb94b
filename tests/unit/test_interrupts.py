"""SIGINT during training: asked first, forced when nobody hears of it, and forgotten once somebody has."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest

from speedlab.trainer import interrupts
from speedlab.trainer.interrupts import Interruption


@pytest.fixture(autouse=True)
def usual_handlers() -> Iterator[None]:
    """Whatever a test leaves behind, the next one has the usual ones."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)}
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


def armed() -> bool:
    return signal.getitimer(signal.ITIMER_REAL)[0] > 0


def ask(times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGINT at each of these moments, in seconds."""
    for moment in times:
        monkeypatch.setattr(interrupts.time, "monotonic", lambda moment=moment: moment)
        os.kill(os.getpid(), signal.SIGINT)


def busy(seconds: float) -> None:
    """Work that does not look for signals."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def wait_to_be_forced(moments: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked at the first moment and heard of before each later one; then nobody hears."""
    with Interruption() as interruption:
        ask(moments[:1], monkeypatch)
        for moment in moments[1:]:
            interruption.heard()
            ask([moment], monkeypatch)
        assert interruption.asked
        busy(5)


@pytest.mark.parametrize("moments", [[100.0], [100.0, 110.0]])
def test_what_nobody_hears_of_is_forced_the_second_time_too(monkeypatch, moments):
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 0.05)
    with pytest.raises(KeyboardInterrupt, match="did not end in time"):
        wait_to_be_forced(moments, monkeypatch)
    assert not armed()


def test_a_long_save_after_an_interrupt_that_was_heard_is_not_broken_off(monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 0.05)
    with Interruption() as interruption:
        ask([100.0], monkeypatch)
        assert armed()
        interruption.heard()
        assert not armed()
        assert not interruption.asked
        busy(0.2)


def test_the_clusters_repeats_are_the_same_request(monkeypatch):
    """It sends the signal again while a rank still works, and a save after the step is such work."""
    with Interruption() as interruption:
        ask([100.0], monkeypatch)
        interruption.heard()
        ask([100.25, 100.5, 101.0], monkeypatch)
        assert not interruption.asked
        assert not armed()


def test_what_must_not_be_broken_off_is_not_and_the_request_stays(monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 0.05)
    with Interruption() as interruption:
        with interruption.held():
            ask([100.0], monkeypatch)
            busy(0.2)
            monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 60.0)
        assert interruption.asked
        assert armed()


def test_a_peers_interrupt_that_is_heard_first_leaves_the_own_signal_a_repeat(monkeypatch):
    """All ranks get the signal, not at once: the step may carry a peer's before the own one comes."""
    with Interruption() as interruption:
        monkeypatch.setattr(interrupts.time, "monotonic", lambda: 100.0)
        interruption.heard()
        ask([100.1], monkeypatch)
        assert not interruption.asked
        assert not armed()


def test_a_request_right_behind_the_last_advance_is_a_new_one(monkeypatch):
    """The cluster sends its repeats as often as a signal counts as repeated: none of them would ever be heard."""
    interruption = Interruption()
    with interruption:
        ask([100.0], monkeypatch)
    with interruption:
        ask([100.5], monkeypatch)
        assert interruption.asked
        assert armed()


class Passing:
    """The error of a finalizer goes nowhere."""

    def __del__(self) -> None:
        busy(0.2)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_is_forced_inside_a_finalizer_is_forced_again(monkeypatch):
    def loses_the_first() -> None:
        with Interruption():
            ask([100.0], monkeypatch)
            Passing()
            busy(5)

    monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 0.05)
    with pytest.raises(KeyboardInterrupt, match="did not end in time"):
        loses_the_first()
    assert not armed()


def test_handlers_are_those_from_before(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    with Interruption():
        ask([100.0], monkeypatch)
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) == before
    assert not armed()
