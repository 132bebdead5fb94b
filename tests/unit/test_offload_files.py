"""speedlab.offload: files without a name, memory in whole pages, and how fast a disk is said to be."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from speedlab.comm import BufferMeter
from speedlab.offload import BufferPool, OffloadError, measure_disk
from speedlab.offload import disk_benchmark as measure_module
from speedlab.offload.anonymous_file import PREFIX, AnonymousFile, remove_leftovers
from speedlab.offload.file_allocator import FileAllocator

OURS = f"{PREFIX}12345-0-0123456789abcdef"


def without_tmpfile(monkeypatch: pytest.MonkeyPatch, number: int = errno.EOPNOTSUPP) -> None:
    """As on file systems that make no file without a name."""
    real = os.open

    def refuse(path: Any, flags: int, *arguments: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *arguments)

    monkeypatch.setattr(os, "open", refuse)


# ---- files without a name --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tmpfile", [True, False])
def test_a_file_has_no_name_and_is_for_its_user_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tmpfile: bool
) -> None:
    if not tmpfile:
        without_tmpfile(monkeypatch)
    file = AnonymousFile(tmp_path, 3)
    status = os.fstat(file._descriptor)
    assert (stat.S_IMODE(status.st_mode), status.st_nlink, status.st_size) == (0o600, 0, 0)
    assert not os.get_inheritable(file._descriptor)
    assert os.listdir(tmp_path) == []
    descriptor = file._descriptor
    del file
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("when", ["flag", "transfer"])
def test_without_o_direct_the_page_cache_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str) -> None:
    real_flags, real_write = fcntl.fcntl, os.pwritev

    def set_flags(descriptor: int, command: int, flags: int = 0) -> int:
        if when == "flag" and command == fcntl.F_SETFL and flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "")
        return real_flags(descriptor, command, flags)

    def write(descriptor: int, *arguments: Any) -> int:
        if real_flags(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "")
        return real_write(descriptor, *arguments)

    monkeypatch.setattr(fcntl, "fcntl", set_flags)
    monkeypatch.setattr(os, "pwritev", write)
    given_up: list[tuple[int, int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda descriptor, *arguments: given_up.append(arguments))
    file = AnonymousFile(tmp_path, 0)
    assert not file.direct
    data = memoryview(bytearray(b"speed" * 100))
    file.grow(0, 4096)
    file.write(data, 7)
    into = memoryview(bytearray(500))
    file.read(into, 7)
    assert into == data
    assert given_up == [(0, 0, os.POSIX_FADV_RANDOM), *[(7, 500, os.POSIX_FADV_DONTNEED)] * 2]


def test_a_disk_that_fails_at_once_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pwritev", fail)
    with pytest.raises(OffloadError, match=r"cannot write to .*Input/output error \(EIO\); check the disk"):
        AnonymousFile(tmp_path, 0)


def test_a_folder_of_no_use_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OffloadError, match=r"nowhere is no folder; create it on the disk"):
        AnonymousFile(tmp_path / "nowhere", 0)
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match="file is no folder"):
        AnonymousFile(tmp_path / "file", 0)
    without_tmpfile(monkeypatch, errno.EACCES)
    with pytest.raises(OffloadError, match=r"make a file in .*denied \(EACCES\); name a folder that this user"):
        AnonymousFile(tmp_path, 0)


def test_only_what_is_ours_and_unlocked_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = tmp_path / OURS
    left.write_bytes(b"states")
    others = [
        tmp_path / f"{PREFIX}12345-0-0123456789abcdeg",
        tmp_path / f"{PREFIX}mine",
        tmp_path / OURS[1:],
        tmp_path / "model.safetensors",
    ]
    for path in others:
        path.touch()
    aim = tmp_path / "aim"
    aim.touch()
    link, folder, pipe = (tmp_path / f"{PREFIX}{number}-0-0123456789abcdef" for number in (1, 2, 3))
    link.symlink_to(aim)
    folder.mkdir()
    os.mkfifo(pipe)
    locked = tmp_path / f"{PREFIX}4-0-0123456789abcdef"
    with locked.open("wb") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        assert remove_leftovers(tmp_path) == [left]
    assert sorted(tmp_path.iterdir()) == sorted([*others, aim, link, folder, pipe, locked])
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert remove_leftovers(tmp_path) == []
    AnonymousFile(tmp_path, 0)
    assert not locked.exists(), "nobody holds it any more"


KILLED = """
import os, signal, sys
from pathlib import Path
import torch
from speedlab.comm import CommStats
from speedlab.offload import DiskStore
where, named, early = Path(sys.argv[1]), sys.argv[2] == "named", sys.argv[3] == "early"
if named:
    real = os.open
    def refuse(path, flags, *arguments):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(95, "")
        return real(path, flags, *arguments)
    os.open = refuse
if early:
    Path.unlink = lambda *arguments, **more: os.kill(os.getpid(), signal.SIGKILL)
store = DiskStore(where, rank=1, traffic=CommStats(), device=torch.device("cpu"))
kept = store.keep(1 << 22, torch.float32)
kept.fetch(values=False).wait()
kept.leave(changed=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(("named", "early"), [("nameless", ""), ("named", ""), ("named", "early")])
def test_nothing_is_left_of_a_process_that_is_killed(tmp_path: Path, named: str, early: str) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), named, early], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == bool(early), "killed between naming and unnaming, its name stays"
    AnonymousFile(tmp_path, 0)
    assert os.listdir(tmp_path) == []


# ---- room ------------------------------------------------------------------------------------------------------------


class Sizes:
    """A file that only notes how large it is."""

    size = 0

    def grow(self, size: int, grown: int) -> None:
        assert size == self.size
        self.size = grown

    def shrink(self, size: int) -> None:
        assert size < self.size
        self.size = size


def test_room_is_cut_joined_and_given_back() -> None:
    file = Sizes()
    room = FileAllocator(file)
    a, b, c, d = (room.take(nbytes) for nbytes in (1, 8192, 4096, 5000))
    assert [extent.offset for extent in (a, b, c, d)] == [0, 4096, 12288, 16384]
    assert file.size == 24576
    assert all(extent.fresh for extent in (a, b, c, d))
    room.give_back(b)
    room.give_back(a)
    e = room.take(4097)
    assert (e.offset, e.nbytes, e.fresh) == (0, 8192, False)
    assert room.take(4096).offset == 8192
    assert room.take(4096).offset == 24576
    room.give_back(c)
    assert file.size == 28672
    assert room.take(0) == (28672, 0, True)


def test_the_smallest_stretch_that_fits_is_taken() -> None:
    room = FileAllocator(Sizes())
    extents = [room.take(nbytes) for nbytes in (16384, 1, 8192, 1)]
    room.give_back(extents[0])
    room.give_back(extents[2])
    assert room.take(8192).offset == extents[2].offset


def test_room_at_the_end_goes_back_to_the_disk() -> None:
    file = Sizes()
    room = FileAllocator(file)
    a, b, c = (room.take(4096) for _ in range(3))
    room.give_back(b)
    assert file.size == 12288
    room.give_back(c)
    assert file.size == 4096
    room.give_back(a)
    assert file.size == room.size == 0


# ---- buffers ---------------------------------------------------------------------------------------------------------


def test_buffers_are_whole_pages_used_again_and_counted() -> None:
    meter = BufferMeter()
    buffers = BufferPool(meter)
    one = buffers.take(5000)
    assert (one.dtype, one.shape, one.data_ptr() % 4096) == (torch.uint8, (8192,), 0)
    assert meter.live_bytes == 8192
    address = one.data_ptr()
    buffers.give_back(one)
    assert buffers.take(8192).data_ptr() == address
    assert buffers.take(8192).data_ptr() != address
    assert meter.live_bytes == 16384
    buffers.close()
    assert meter.live_bytes == 0
    assert meter.take_peak() == 16384


def test_idle_buffers_make_room_for_one_that_does_not_fit() -> None:
    meter = BufferMeter()
    buffers = BufferPool(meter)
    small = [buffers.take(100 * 4096) for _ in range(4)]
    for buffer in small[:3]:
        buffers.give_back(buffer)
    large = buffers.take(150 * 4096)
    assert meter.live_bytes == (100 + 100 + 150) * 4096, "two idle ones went for it"
    buffers.give_back(large)
    assert buffers.take(120 * 4096).shape == (120 * 4096,)
    assert meter.live_bytes == (100 + 100 + 150) * 4096, "a fifth of it lies unused"
    buffers.trim()
    assert meter.live_bytes == (100 + 150) * 4096


def test_a_large_idle_buffer_is_no_small_one() -> None:
    meter = BufferMeter()
    buffers = BufferPool(meter)
    buffers.give_back(buffers.take(100 * 4096))
    buffers.take(4096)
    assert meter.live_bytes == 4096


def test_memory_that_is_not_there_is_an_error() -> None:
    meter = BufferMeter()
    with pytest.raises(MemoryError, match="offload: the system has no"):
        BufferPool(meter).take(1 << 60)
    assert meter.live_bytes == 0


# ---- measuring -------------------------------------------------------------------------------------------------------


def test_a_disk_is_measured_once_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "_KNOWN", {})
    state = torch.random.get_rng_state()
    speed = measure_disk(tmp_path, seconds=0.1)
    assert min(speed.read_bytes_per_second, speed.write_bytes_per_second) > 1e5
    assert (speed.threads, speed.chunk_bytes) in measure_module._WAYS
    assert measure_disk(tmp_path) is speed
    assert os.listdir(tmp_path) == []
    assert torch.random.get_rng_state().equal(state), "training draws from it"


def test_the_fastest_way_is_taken_and_more_threads_only_when_they_help(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def speed(folder: Path, threads: int, chunk_bytes: int, nbytes: int) -> measure_module.DiskSpeed:
        rate = {4: 1e9, 2: 1.2e9, 8: 1.25e9, 16: 2e9}[threads]
        return measure_module.DiskSpeed(
            read_bytes_per_second=rate,
            write_bytes_per_second=rate,
            threads=threads,
            chunk_bytes=chunk_bytes,
            direct=True,
        )

    monkeypatch.setattr(measure_module, "_KNOWN", {})
    monkeypatch.setattr(measure_module, "_speed", speed)
    assert measure_disk(tmp_path, seconds=100).threads == 16
    monkeypatch.setattr(measure_module, "_KNOWN", {})
    monkeypatch.setattr(measure_module, "_WAYS", measure_module._WAYS[:-1])
    assert measure_disk(tmp_path, seconds=100).threads == 2


def test_a_folder_that_is_none_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match="is no folder"):
        measure_disk(tmp_path / "nowhere")
