"""`python -m tests.benchmarks offload`: what it tells, and a run of it under a limit on memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from speedlab.offload import DiskSpeed
from tests.benchmarks import offload
from tests.benchmarks.memory_limit import NoLimitError, _remove, memory_limit

DISK = DiskSpeed(
    read_bytes_per_second=1e9, write_bytes_per_second=5e8, threads=4, chunk_bytes=1 << 20, direct=True
)  # fmt: skip


def side(**changes: object) -> dict[str, object]:
    facts = {"losses": [3.0, 2.5, 2.0], "seconds": [9.0, 2.0, 4.0], "read": 0, "written": 0, "peak": 2**30}
    return facts | {"parameters": 10, "states": 2**30} | changes


def test_each_step_is_held_against_the_longer_of_computing_and_the_disk() -> None:
    away = side(seconds=[99.0, 4.5, 5.0], read=10**9, written=10**9)  # 1 s to read, 2 s to write.
    *_, reported = offload._reported({"memory": side(), "disk": away}, DISK, 2**28, 2**27)
    assert reported.endswith("4.75 s, 1.38 (1.25..1.50) times the longer of both")


def test_the_peer_is_held_against_ours() -> None:
    both = {"memory": side(), "disk": side(), "DeepSpeed": side(seconds=[1.0, 4.0, 4.0])}
    *_, reported = offload._reported(both, DISK, 2**28, 2**27)
    assert reported.endswith("4.00 s, 1.50 (1.00..2.00) times ours; without a limit, 1.00 GiB taken")


def test_losses_that_differ_are_told() -> None:
    reported = offload._reported({"memory": side(), "disk": side(losses=[3.0, 2.6])}, DISK, 2**28, 2**27)
    assert any("DIFFERENT" in line for line in reported)
    assert any("4.0 times the limit" in line for line in reported)


def test_a_small_training_under_a_limit(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        with memory_limit("speedlab-test"):
            pass
    except NoLimitError as error:
        pytest.skip(str(error))
    small = ["--layers", "3", "--hidden", "64", "--tokens", "16", "--steps", "2", "--times", "0.005", "--no-peer"]
    offload.main([*small, "--folder", str(tmp_path)])
    reported = capsys.readouterr().out
    assert "the same bits" in reported
    assert "times the longer of both" in reported


def test_a_group_whose_process_is_just_ending_goes_a_moment_later(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    group, busy = tmp_path / "group", [errno.EBUSY, errno.EBUSY]
    group.mkdir()
    (group / "cgroup.procs").touch()

    def rmdir(path: Path) -> None:
        if busy:
            raise OSError(busy.pop(), "busy")
        (path / "cgroup.procs").unlink()
        os.rmdir(path)

    monkeypatch.setattr(Path, "rmdir", rmdir)
    _remove(group)
    assert not group.exists()


def test_late_updates_beside_those_at_once(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    offload.main(
        ["--delayed", "--layers", "2", "--hidden", "64", "--tokens", "16", "--steps", "2", "--folder", str(tmp_path)]
    )
    host, disk = capsys.readouterr().out.splitlines()
    assert (host[:17], disk[:17]) == ("optimizer on host", "optimizer on disk")
    assert all(" s a step, late " in line and line.endswith(" of it") for line in (host, disk))
