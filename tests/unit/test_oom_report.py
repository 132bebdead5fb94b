"""What is said when a rank runs out of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from telemetry_samples import make_event, make_folder, make_record

from speedlab.cluster.errors import DIED, RankError, RemoteFailure
from speedlab.cluster.oom_report import allocation_bytes, out_of_memory_lines, tipping_category
from speedlab.hardware import Device
from speedlab.planner import parameter_count
from speedlab.planner.calibration import store
from speedlab.telemetry.records import Ledger
from speedlab.telemetry.writer import RecordWriter

GIB = 2**30
DEVICE = Device(
    kind="cpu", name="cpu 0", uuid="", cores=(0,), threads=1, capacity_bytes=GIB, free_bytes=GIB, fast_dtype="float32"
)
CUDA = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 4.00 GiB"


@pytest.fixture(autouse=True)
def _not_calibrated(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(store, "path", lambda folder=None: tmp_path / "none.json")


def run_of(tmp_path: Path, ledger: Ledger):
    folder = make_folder(tmp_path, model="gpt-tiny", zero=0)
    for rank in range(4):
        writer = RecordWriter(folder, rank, stream_hz=10.0)
        writer.write(make_record(1, rank, ledger=ledger))
        if rank == 0:
            said = {"parameters": parameter_count(folder.config.model), "dtype": "float32"}
            writer.event(make_event("started", details=said))
        writer.close()
    return folder


def test_the_rank_the_category_the_size_and_three_changes_are_told(tmp_path: Path) -> None:
    folder = run_of(tmp_path, Ledger(activations=GIB // 2, parameters=GIB // 8, reported_bytes=GIB, capacity_bytes=GIB))
    failure = RemoteFailure(kind="OutOfMemoryError", message=CUDA, step=2, module="blocks.3.mlp")
    first, heading, *changes, more = out_of_memory_lines(RankError({2: failure}), folder, [DEVICE] * 4)
    assert first == (
        "Out of memory on rank 2: 1.5 GiB for activations in forward of blocks.3.mlp did not fit; it held 1.0 GiB of "
        "1.0 GiB: activations 512 MiB, parameters 128 MiB"
    )
    assert heading == "Cheapest changes that fit:"
    assert len(changes) == 3
    assert more == "more: speedlab guide trouble memory"
    error = RankError({2: failure})
    error.notes = [first, heading, *changes]
    assert f"  {first}\n  {heading}\n" in str(error)
    assert str(error).splitlines()[-1].endswith("Look: %speedlab debug 2, or %%ranks 2")


def test_a_process_that_was_full_when_it_ended_ran_out_and_another_did_not(tmp_path: Path) -> None:
    died = RankError({1: RemoteFailure(kind=DIED, message="the process ended")})
    full = run_of(tmp_path / "full", Ledger(activations=GIB, reported_bytes=GIB, capacity_bytes=GIB))
    assert "ended by the system" in out_of_memory_lines(died, full, [DEVICE] * 4)[0]
    empty = run_of(tmp_path / "empty", Ledger(activations=1, reported_bytes=GIB // 2, capacity_bytes=GIB))
    assert out_of_memory_lines(died, empty, [DEVICE] * 4) == []


def test_other_failures_are_left_alone(tmp_path: Path) -> None:
    folder = run_of(tmp_path, Ledger(reported_bytes=GIB, capacity_bytes=GIB))
    shapes = RankError({0: RemoteFailure(kind="RuntimeError", message="mat1 and mat2 shapes cannot be multiplied")})
    assert out_of_memory_lines(shapes, folder, [DEVICE] * 4) == []


def test_the_innermost_call_says_what_was_asked_for() -> None:
    forward = 'File "gpt.py", line 9, in forward\n    return self.mlp(x)\n'
    gather = 'File "zero.py", line 3, in _gather\n    flat = torch.empty(n)\n'
    assert tipping_category(RemoteFailure(kind="MemoryError", message="", traceback=forward)) == "activations"
    assert tipping_category(RemoteFailure(kind="MemoryError", message="", traceback=forward + gather)) == (
        "communication_buffers"
    )


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (CUDA, 3 * GIB // 2),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("something else", 0),
    ],
)
def test_the_size_is_read_from_the_allocators_words(message: str, size: int) -> None:
    assert allocation_bytes(message) == size
