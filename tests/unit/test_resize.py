"""What another number of engines asks of parts that need no engine: devices, output, the folder, the configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from telemetry_samples import make_event, make_folder

from speedlab import hardware
from speedlab.cluster.errors import ClusterError
from speedlab.cluster.files import processes
from speedlab.cluster.known_runs import saved_step
from speedlab.cluster.launch.placement import devices_for
from speedlab.cluster.output_folding import FOLD_SECONDS, LineFolder
from speedlab.config import ConfigError, RunConfig
from speedlab.hardware import Device
from speedlab.telemetry.current_config import changed_config
from speedlab.telemetry.run_folder import RunFolder
from speedlab.telemetry.writer import note


def gpu(number: int) -> Device:
    return Device(
        kind="cuda",
        name="GPU",
        uuid=f"GPU-{number}",
        cores=(0,),
        threads=1,
        capacity_bytes=8,
        free_bytes=7,
        fast_dtype="bfloat16",
    )


def test_ranks_that_stay_keep_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "cuda_devices", lambda: [gpu(number) for number in (3, 2, 1, 0)])
    present = [gpu(1), gpu(3)]
    assert [device.uuid for device in devices_for(4, present)] == ["GPU-1", "GPU-3", "GPU-2", "GPU-0"]
    assert [device.uuid for device in devices_for(1, present)] == ["GPU-1"]
    with pytest.raises(ClusterError, match="5 engines were asked for, but only 4 GPUs can be seen"):
        devices_for(5, present)
    with pytest.raises(ClusterError, match="0 engines was asked for"):
        devices_for(0, present)


def test_cpu_cores_are_shared_out_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "available_cores", lambda: tuple(range(8)))
    present = hardware.cpu_devices(2)
    assert [(device.cores, device.threads) for device in devices_for(4, present)] == [
        ((0, 1), 2),
        ((2, 3), 2),
        ((4, 5), 2),
        ((6, 7), 2),
    ]


def test_lines_of_ranks_that_left_still_come_out_and_nobody_waits_for_them() -> None:
    folder = LineFolder(range(4))
    folder.feed(3, "stdout", "last words\n", 0.0)
    folder.expect(2)
    for rank in (0, 1):
        folder.feed(rank, "stdout", "hello\n", 0.0)
    assert folder.drain(FOLD_SECONDS) == [([0, 1], "stdout", "hello\n"), ([3], "stdout", "last words\n")]
    folder.expect(2)
    for rank in (0, 1):
        folder.feed(rank, "stdout", "again\n", 1.0)
    assert folder.drain(1.0) == [([0, 1], "stdout", "again\n")]
    folder.expect(3)
    for rank in (0, 1):
        folder.feed(rank, "stdout", "three\n", 2.0)
    assert folder.drain(2.0) == []  # Rank 2 may still say the same.


def test_a_configuration_that_was_replaced_is_seen_by_every_handle(tmp_path: Path) -> None:
    made = make_folder(tmp_path, "first", zero=1)
    other = RunFolder(made.path)
    made.update_config(made.config.replace(zero=3))
    assert made.config.zero.stage == other.config.zero.stage == 3
    (made.path / "config.json").unlink()
    assert other.config.zero.stage == 3


def test_the_kernels_own_events_stand_among_those_of_the_ranks(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "first")
    for step in (3, 5):
        note(folder, make_event("reshaped", step))
    assert [event.step for event in folder.read_events()] == [3, 5]


def test_the_step_of_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "first")
    assert saved_step(folder) is None
    for name, text in {"b": '{"step": 7}', "a": '{"step": 12}', "c": '{"step": ', "d": "[]"}.items():
        (folder.path / "checkpoints" / name).mkdir()
        (folder.path / "checkpoints" / name / "manifest.json").write_text(text)
    assert saved_step(folder) == 12


@given(
    micro=st.integers(1, 6),
    accumulation=st.integers(1, 4),
    before=st.sampled_from([1, 2, 3, 4]),
    after=st.sampled_from([1, 2, 3, 4, 6]),
)
def test_the_global_batch_stays_and_micro_batches_do_not_grow(
    micro: int, accumulation: int, before: int, after: int
) -> None:
    config = RunConfig(batch={"micro_size": micro, "accumulation": accumulation})
    total = micro * accumulation * before
    if total % after:
        with pytest.raises(ConfigError, match=rf"global {total} = .* × dp {after} has no whole solution"):
            changed_config(config, after, before=before)
        return
    changed = changed_config(config, after, before=before)
    batch = changed.batch.resolve(changed.layout(after).dp)
    assert (batch.global_size, batch.dp) == (total, after)
    assert batch.micro_size <= micro or before == after


def test_dp_follows_the_engines_though_it_was_given() -> None:
    config = RunConfig(parallel={"dp": 2}, batch=8)
    changed = changed_config(config, 4, before=2, tp=2)
    assert (changed.layout(4).dp, changed.layout(4).tp) == (2, 2)
    assert changed_config(config, 4, before=2).layout(4).dp == 4


def test_what_must_not_be_cut_in_two_ends_before_an_interrupt_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    asked = threading.Event()
    joined = threading.Thread.join

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        if not asked.is_set():
            asked.set()
            raise KeyboardInterrupt
        joined(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", join)
    done: list[int] = []

    def work() -> None:
        assert asked.wait(10)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        processes.uninterrupted(work)
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        processes.uninterrupted(lambda: 1 // 0)
    assert processes.uninterrupted(lambda: 42) == 42
