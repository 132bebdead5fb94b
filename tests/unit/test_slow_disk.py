"""A disk that steps wait for: from which steps that is found, and what is said, once."""

from __future__ import annotations

from speedlab.config import OffloadConfig
from speedlab.engine.phase_timer import StepCosts
from speedlab.trainer.health import SlowDisk

DISK = OffloadConfig(optimizer="disk")


def step(seconds: float, waited: float) -> StepCosts:
    phases = {"forward": seconds - waited, **({"offload": waited} if waited else {})}
    return StepCosts(seconds=seconds, phases=phases, sent_bytes={}, moved_bytes={}, kernels={})


def said(*steps: StepCosts, offload: OffloadConfig = DISK) -> list[str]:
    watch = SlowDisk()
    return [watch.after_step(offload, each) for each in steps]


def test_it_is_said_once_and_the_first_step_does_not_count() -> None:
    slow = said(step(9, 9), step(2, 1), step(2, 0.5), step(2, 0.3), *[step(2, 2)] * 5)
    assert [bool(text) for text in slow] == [False, False, False, True, *[False] * 5]
    assert slow[3] == (
        "offload: steps wait 0.6 s of 2 s (30%, measured) for the disk with states, which limits them; the run goes "
        "on. Larger micro-batches, offload.folder on a faster disk, or offload.optimizer 'host' would wait less"
    )


def test_waits_for_the_host_are_told_apart_only_by_where_states_lie() -> None:
    both = OffloadConfig(optimizer="disk", parameters="host")
    assert "for the host and the disk with states" in said(*[step(2, 1)] * 4, offload=both)[3]


def test_nothing_is_said_of_a_disk_that_does_not_limit() -> None:
    assert not any(said(step(9, 9), *[step(2, 0.099)] * 9))
    assert any(said(step(9, 0), *[step(2, 0.11)] * 3))
    assert not any(said(*[step(2, 0)] * 9))


def test_nothing_is_said_where_no_disk_holds_states() -> None:
    for offload in (OffloadConfig(), OffloadConfig(optimizer="host")):
        assert not any(said(*[step(2, 2)] * 9, offload=offload))


def test_it_is_measured_anew_where_states_go_elsewhere() -> None:
    watch = SlowDisk()
    quick = [watch.after_step(DISK, step(2, 0)) for _ in range(6)]
    moved = [watch.after_step(OffloadConfig(optimizer="disk", parameters="disk"), step(2, 1)) for _ in range(6)]
    assert [bool(text) for text in quick + moved] == [False] * 9 + [True] + [False] * 2
