"""Files of checkpoints without ranks: what the library reads of what we write, manifests that are not whole, and which
checkpoints go."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from speedlab.engine.checkpoint import CheckpointError, prune
from speedlab.engine.checkpoint import async_save as saving_module
from speedlab.engine.checkpoint.async_save import (
    Saving,
    await_outcome,
    await_reports,
    peers_of,
    report_file,
    whose,
    write_report,
)
from speedlab.engine.checkpoint.manifest import read_manifest
from speedlab.engine.checkpoint.safetensors_files import Values, write_tensors
from speedlab.telemetry.checkpoint_index import Checkpoint, newest

# ---- the file --------------------------------------------------------------------------------------------------------


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    numbers = torch.arange(3000.0)
    tensors = {
        "half": torch.randn(5, 3).to(torch.bfloat16),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "flags": torch.tensor([True, False, True]),
        "scalar": torch.tensor(3, dtype=torch.int64),
        "empty": torch.zeros(0),
        "wide": torch.randn(2, 3, dtype=torch.float64),
        "float16": torch.randn(9).half(),
    }
    values = {name: Values.of(tensor) for name, tensor in tensors.items()}
    values["pieces"] = Values((2, 1000), torch.float32, [numbers[:500], lambda: numbers[1000:2500]])
    file = tmp_path / "some.safetensors"
    size, digest = write_tensors(file, values, metadata={"format": "pt"})
    read = load_file(file)
    assert read.keys() == {*tensors, "pieces"}
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].equal(tensor), name
    assert read["pieces"].equal(torch.cat((numbers[:500], numbers[1000:2500])).view(2, 1000))
    assert size == file.stat().st_size
    assert digest == hashlib.sha256(file.read_bytes()).hexdigest()


def test_chunks_come_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speedlab.engine.checkpoint.safetensors_files._CHUNK_BYTES", 64)
    values = torch.arange(1001.0)
    _, digest = write_tensors(tmp_path / "x", {"a": Values.of(values)})
    assert load_file(tmp_path / "x")["a"].equal(values)
    assert digest == hashlib.sha256((tmp_path / "x").read_bytes()).hexdigest()


def test_a_full_disk_is_an_error_that_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match=r"some\.safetensors: cannot be written: No space left"):
        write_tensors(tmp_path / "some.safetensors", {"a": Values.of(torch.ones(3))})


def test_a_dtype_that_the_format_lacks_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"some is of torch\.float8_e4m3fnuz"):
        write_tensors(tmp_path / "x", {"some": Values.of(torch.ones(3).to(torch.float8_e4m3fnuz))})


# ---- the manifest ----------------------------------------------------------------------------------------------------


def manifest_with(slices: list[dict[str, Any]], shape: list[int]) -> dict[str, Any]:
    return {
        "format": "speedlab-checkpoint",
        "version": 2,
        "step": 1,
        "files": {"rank-0.safetensors": {"bytes": 1, "sha256": None}},
        "loss_scale": {},
        "groups": [],
        "client_state": {},
        "random": [],
        "parameters": {"w": {"shape": shape, "states": {"master": "float32"}, "scalars": {}, "slices": slices}},
    }


def piece(start: int, end: int, ranges: list[list[int]] | None = None, dim: int = 1) -> dict[str, Any]:
    own = {"file": "rank-0.safetensors", "flat": "f", "offset": 0, "start": start, "end": end}
    return own if ranges is None else {**own, "part": {"dim": dim, "ranges": ranges}}


@pytest.mark.parametrize(
    "slices",
    [
        [piece(0, 24)],
        [piece(0, 7), piece(7, 24)],
        [piece(0, 8, [[0, 2]]), piece(0, 16, [[2, 6]])],
        [piece(0, 8, [[4, 6]]), piece(0, 10, [[0, 1], [2, 4]]), piece(10, 12, [[0, 1], [2, 4]]), piece(0, 4, [[1, 2]])],
        [piece(0, 16, [[0, 4]]), piece(0, 16, [[2, 6]])],  # Ranks that share what is between.
    ],
)
def test_slices_that_make_a_whole(tmp_path: Path, slices) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest_with(slices, [4, 6])))
    assert read_manifest(tmp_path)["step"] == 1


@pytest.mark.parametrize(
    ("slices", "complaint"),
    [
        ([piece(0, 20)], "hold 20 of its 24"),
        ([piece(0, 12), piece(13, 24)], "gap or overlap at element 12"),
        ([piece(0, 12), piece(11, 24)], "gap or overlap at element 12"),
        ([], "has no slices"),
        ([piece(0, 8, [[0, 2]]), piece(0, 12, [[3, 6]])], "no part of w holds index 2"),
        ([piece(0, 8, [[0, 2]]), piece(0, 12, [[2, 5]])], "no part of w holds index 5"),
        ([piece(0, 7, [[0, 2]]), piece(0, 16, [[2, 6]])], "hold 7 of its 8"),
        ([piece(0, 8, [[0, 2]]), piece(0, 20, [[2, 7]])], r"a part of w is \[2, 7\) of 6"),
        ([piece(0, 8, [[0, 2]]), piece(0, 18, [[1, 4]], dim=0)], r"cut along dimensions \[0, 1\]"),
    ],
)
def test_slices_that_do_not(tmp_path: Path, slices, complaint: str) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps(manifest_with(slices, [4, 6])))
    with pytest.raises(CheckpointError, match=complaint) as caught:
        read_manifest(tmp_path)
    assert str(tmp_path / "manifest.json") in str(caught.value)


# ---- which go --------------------------------------------------------------------------------------------------------


def complete(folder: Path, name: str, step: int, *, cut: bool = False) -> None:
    path = folder / name
    path.mkdir(parents=True)
    (path / "rank-0.safetensors").write_bytes(b"x" * (5 if cut else 10))
    manifest = {"format": "speedlab-checkpoint", "step": step, "files": {"rank-0.safetensors": {"bytes": 10}}}
    (path / "manifest.json").write_text(json.dumps(manifest))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_only_numbered_ones_go_and_the_newest_stay(tmp_path: Path) -> None:
    for step in (9, 10, 20, 100):
        complete(tmp_path, f"step-{step:02d}", step)
    complete(tmp_path, "before-reshape", 5)
    complete(tmp_path, "step-by-step", 6)
    (tmp_path / "step-000001").mkdir()  # A folder that is no checkpoint is none of ours.
    removed = prune(tmp_path, 2)
    assert [path.name for path in removed] == ["step-09", "step-10"], "by step, not by name"
    assert names(tmp_path) == ["before-reshape", "step-000001", "step-100", "step-20", "step-by-step"]
    assert prune(tmp_path, 5) == []


def test_damaged_ones_do_not_count_and_the_newest_good_one_stays(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        complete(tmp_path, f"step-{step}", step, cut=step == 3)
    prune(tmp_path, 1)
    assert names(tmp_path) == ["step-2", "step-3"]
    assert newest(tmp_path) == Checkpoint(path=tmp_path / "step-3", step=3)
    complete(tmp_path / "all", "step-1", 1, cut=True)
    assert prune(tmp_path / "all", 1) == []


# ---- saving in the background ----------------------------------------------------------------------------------------


def test_a_rank_that_never_reports_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving_module, "_PATIENCE_SECONDS", 0.05)
    for rank in (0, 2):
        write_report(report_file(tmp_path, rank), {})
    with pytest.raises(CheckpointError, match="rank 1, 3 did not write"):
        await_reports(tmp_path, 4)


@pytest.mark.timeout(30)
def test_nobody_waits_for_a_process_that_has_ended(tmp_path: Path) -> None:
    """Killed in the middle of its part; what it had reported before counts."""
    hidden, target = tmp_path / ".here.partial", tmp_path / "here"
    hidden.mkdir()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        host, _ = whose()
        peers = peers_of({0: [host, other.pid], 1: [host, os.getpid()], 2: ["elsewhere", other.pid]})
        assert peers.keys() == {0}, "only who can be seen from here, and not this process"
        write_report(report_file(hidden, 1), {})
        other.kill()
    with pytest.raises(CheckpointError, match="the process of rank 0 ended before its part was written"):
        await_reports(hidden, 2, peers)
    with pytest.raises(CheckpointError, match="the process of rank 0 ended before it was complete"):
        await_outcome(hidden, target, peers)
    write_report(report_file(hidden, 0), {})
    await_reports(hidden, 2, peers)
    hidden.rename(target)
    await_outcome(hidden, target, peers)
    with pytest.raises(CheckpointError, match="the process of rank 3 has ended"):
        peers_of({3: [host, other.pid]})


@pytest.mark.timeout(30)
def test_nobody_waits_for_a_folder_that_was_removed(tmp_path: Path) -> None:
    for wait in (lambda hidden: await_reports(hidden, 2), lambda hidden: await_outcome(hidden, tmp_path / "here")):
        with pytest.raises(CheckpointError, match=r"gone: was removed while it was written"):
            wait(tmp_path / "gone")


def test_a_failure_of_any_kind_is_told(tmp_path: Path) -> None:
    def work() -> None:
        raise ZeroDivisionError("seven")

    saving = Saving(tmp_path / "x", 10, work)
    with pytest.raises(CheckpointError, match="was not saved: ZeroDivisionError: seven"):
        saving.wait(10)
    assert saving.done
    assert saving.seconds is not None
