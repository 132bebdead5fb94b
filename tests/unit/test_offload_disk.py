"""speedlab.offload.disk_store: what was kept comes back, in every order of calls, and what happens when the disk
fails."""

from __future__ import annotations

import errno
import os
import signal
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from speedlab.comm import CommStats
from speedlab.offload import DiskStore, OffloadError
from speedlab.offload.anonymous_file import AnonymousFile
from speedlab.offload.io_queue import IORequest
from speedlab.placement import MemoryKind

CPU = torch.device("cpu")
CHUNK = 8192
DTYPES = (torch.float32, torch.bfloat16, torch.uint8)
FAR = 30.0
"""Seconds after which a wait in a test has failed."""


def noise(numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Any bits."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)


def same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit: what is NaN as well."""
    return one.view(torch.uint8).equal(other.view(torch.uint8))


def make(folder: Path, **more: Any) -> DiskStore:
    given: dict[str, Any] = {"rank": 0, "traffic": CommStats(), "device": CPU, "threads": 3, "chunk_bytes": CHUNK}
    return DiskStore(folder, **(given | more))


@pytest.fixture(params=["direct", "cached"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DiskStore]:
    if request.param == "cached":
        monkeypatch.setattr(AnonymousFile, "_goes_direct", lambda file: False)
    made = make(tmp_path)
    yield made
    made.close()


def put(kept: Any, values: Tensor) -> None:
    """A turn that changes all of it."""
    kept.fetch(values=False).wait()
    kept.tensor.copy_(values)
    kept.leave(changed=True)


def got(kept: Any) -> Tensor:
    into = torch.empty(kept.numel, dtype=kept.dtype)
    kept.read(into).wait()
    return into


class Gate:
    """Stands in the way of an os function: transfers wait until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.calls = 0
        real = getattr(os, name)

        def wait(*arguments: Any) -> int:
            self.calls += 1
            self.reached.set()
            assert self.opened.wait(FAR)
            return real(*arguments)

        monkeypatch.setattr(os, name, wait)


# ---- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 4095, 4096, 4097, 20_000])
def test_turns_give_back_what_was_left(store: DiskStore, dtype: torch.dtype, numel: int) -> None:
    kept = store.keep(numel, dtype)
    assert (kept.where, kept.numel, kept.dtype, kept.nbytes) == (MemoryKind.DISK, numel, dtype, numel * dtype.itemsize)
    kept.fetch().wait()
    assert same(kept.tensor, torch.zeros(numel, dtype=dtype))
    kept.leave(changed=False)
    values = noise(numel, dtype)
    put(kept, values)
    kept.fetch().wait()
    assert same(kept.tensor, values)
    kept.tensor.view(torch.uint8).bitwise_not_()
    kept.leave(changed=False)
    assert same(got(kept), values), "what was not changed is not written"


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_stretches_begin_and_end_anywhere(store: DiskStore, offset: int) -> None:
    kept, plain = store.keep(30_000, torch.bfloat16), noise(30_000, torch.bfloat16, 8)
    alongside = store.keep(30_000, torch.bfloat16)
    put(kept, plain)
    put(alongside, noise(30_000, torch.bfloat16, 9))
    for seed, (start, numel) in enumerate([(0, 1), (4095, 3), (2047, 2049), (4096, 8192), (1, 29_999), (29_999, 1)]):
        # Memory that begins off a page, so that O_DIRECT cannot take it.
        source = noise(numel + offset, torch.bfloat16, seed)[offset:]
        alongside.read(torch.empty(29_999, dtype=torch.bfloat16), 1).wait()  # Staging has something else in it now.
        kept.write(source, start).wait()
        plain[start : start + numel] = source
        into = torch.empty(numel + offset, dtype=torch.bfloat16)[offset:]
        kept.read(into, start).wait()
        assert same(into, source)
        assert same(got(kept), plain)
    assert same(got(alongside), noise(30_000, torch.bfloat16, 9))


@settings(max_examples=60)
@given(st.data())
def test_any_sequence_of_calls_is_as_plain_tensors(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        store = make(Path(folder))
        try:
            _sequence(store, data)
        finally:
            store.close()
        assert os.listdir(folder) == []


def _sequence(store: DiskStore, data: st.DataObject) -> None:
    plain: list[tuple[Any, Tensor]] = []
    waiting: list[tuple[Any, Tensor, Tensor]] = []
    for step in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["keep", "turn", "turn", "look", "read", "read", "write", "write", "drop"]))
        if what == "keep" or not plain:
            numel, dtype = data.draw(st.sampled_from([1, 5000, 12_345])), data.draw(st.sampled_from(DTYPES))
            plain.append((store.keep(numel, dtype), torch.zeros(numel, dtype=dtype)))
            continue
        kept, values = plain[data.draw(st.integers(0, len(plain) - 1))]
        start = data.draw(st.integers(0, kept.numel - 1))
        stop = data.draw(st.integers(start, kept.numel))
        into = torch.empty(stop - start, dtype=kept.dtype)
        match what:
            case "turn":
                kept.fetch().wait()
                assert same(kept.tensor, values)
                reading = kept.read(into, start)  # Begins when the turn has ended.
                values.copy_(noise(kept.numel, kept.dtype, step))
                kept.tensor.copy_(values)
                kept.leave(changed=True)
                waiting.append((reading, into, values[start:stop].clone()))
            case "look":
                first, second = kept.fetch(), kept.fetch()
                for transfer in (first, second):
                    transfer.wait()
                    assert same(kept.tensor, values)
                    kept.leave(changed=False)
            case "read":
                waiting.append((kept.read(into, start), into, values[start:stop].clone()))
            case "write":
                source = noise(stop - start, kept.dtype, step)
                waiting.append((kept.write(source, start), source, source.clone()))
                values[start:stop] = source
            case "drop":
                for transfer, *_ in waiting:
                    transfer.wait()
                kept.drop()
                plain = [pair for pair in plain if pair[0] is not kept]
    for transfer, into, expected in waiting:
        transfer.wait()
        assert transfer.over
        assert same(into, expected)
    store.flush()
    assert store.nbytes == sum(kept.nbytes for kept, _ in plain)
    for kept, values in plain:
        assert same(got(kept), values)


def test_parameters_are_read_into_and_written_from(store: DiskStore) -> None:
    kept = store.keep(10, torch.float32)
    parameter = torch.nn.Parameter(torch.arange(10.0))
    kept.write(parameter).wait()
    with torch.no_grad():
        parameter.zero_()
    kept.read(parameter).wait()
    assert parameter.tolist() == list(range(10))
    assert parameter.is_leaf


@pytest.mark.parametrize(
    ("tensor", "start"),
    [
        (torch.zeros(5), 6),
        (torch.zeros(5), -1),
        (torch.zeros(11), 0),
        (torch.zeros(5, dtype=torch.float64), 0),
        (torch.zeros(10)[::2], 0),
    ],
)
def test_what_does_not_fit_is_refused(store: DiskStore, tensor: Tensor, start: int) -> None:
    kept = store.keep(10, torch.float32)
    for call in (kept.read, kept.write):
        with pytest.raises(ValueError, match=r"of a state of 10 elements of torch\.float32; expected a contiguous"):
            call(tensor, start)


def test_turns_that_are_none_are_refused(store: DiskStore) -> None:
    kept = store.keep(10, torch.float32)
    with pytest.raises(RuntimeError, match="`fetch` it first"):
        _ = kept.tensor
    with pytest.raises(RuntimeError, match="`fetch` it first"):
        kept.leave(changed=False)


def test_chunks_are_whole_pages(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="chunk_bytes is 1000; expected a multiple of 4096"):
        make(tmp_path, chunk_bytes=1000)


# ---- order and counting ----------------------------------------------------------------------------------------------


def test_what_is_fetched_while_it_is_written_is_new(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, values = store.keep(20_000, torch.float32), noise(20_000, torch.float32)
    gate = Gate(monkeypatch, "pwritev")
    put(kept, values)
    assert gate.reached.wait(FAR)
    fetched, into = kept.fetch(), torch.empty(20_000)
    read = kept.read(into)
    assert not fetched.over
    gate.opened.set()
    fetched.wait()
    assert same(kept.tensor, values)
    assert not read.over, "the turn is open"
    kept.tensor.fill_(5)
    kept.leave(changed=True)
    read.wait()
    assert into.eq(5).all()


def test_threads_work_side_by_side_on_one_state_and_several(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kepts = [store.keep(CHUNK, torch.uint8) for _ in range(3)]
    large = store.keep(3 * CHUNK, torch.uint8)
    for kept in (*kepts, large):
        put(kept, noise(kept.numel, torch.uint8))
    store.flush()
    together, real = threading.Barrier(3), os.preadv

    def meet(*arguments: Any) -> int:
        together.wait(FAR)  # All three have to be here at a time.
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", meet)
    large.fetch().wait()
    transfers = [kept.fetch() for kept in kepts]
    for transfer in transfers:
        transfer.wait()


def test_bytes_are_counted_by_direction_and_memory_as_buffers(tmp_path: Path) -> None:
    traffic = CommStats(phase="optimizer")
    store = make(tmp_path, traffic=traffic)
    kept = store.keep(1000, torch.float32)
    put(kept, torch.ones(1000))
    store.flush()
    transfer = kept.fetch()
    assert (transfer.link, transfer.nbytes, transfer.name) == ("disk read", 4000, "")
    transfer.wait()
    kept.leave(changed=False)
    assert kept.write(torch.ones(10)).link == "disk write"
    assert traffic.link_bytes == {"disk write": 4040, "disk read": 4000}
    counted = traffic.take()
    assert counted.sent_bytes == counted.peer_seconds == {}
    assert counted.moved_bytes == {"disk write": 4040, "disk read": 4000}
    assert set(counted.place_seconds) == {"optimizer"}
    assert store.staging_meter.live_bytes == 3 * CHUNK + 4096
    store.flush()
    store.buffers.trim()
    assert store.staging_meter.live_bytes == 3 * CHUNK
    store.close()
    assert store.staging_meter.live_bytes == 0


# ---- room ------------------------------------------------------------------------------------------------------------


def test_room_is_used_again_and_reads_as_zeros(store: DiskStore) -> None:
    first, last = store.keep(30_000, torch.uint8), store.keep(10, torch.uint8)
    put(first, noise(30_000, torch.uint8))
    store.flush()
    size = store._room.size
    first.drop()
    first.drop()
    with pytest.raises(OffloadError, match="was dropped; `keep` a new one"):
        first.fetch()
    again, after = store.keep(20_000, torch.uint8), store.keep(5000, torch.uint8)
    assert store._room.size == size
    assert not got(again).any()
    again.write(torch.ones(3, dtype=torch.uint8), 9000).wait()
    assert got(again).nonzero().flatten().tolist() == [9000, 9001, 9002]
    after.fetch().wait()
    assert not after.tensor.any()
    after.leave(changed=False)
    for kept in (last, again, after):
        kept.drop()
    assert store._room.size == store.nbytes == 0
    assert os.fstat(store.file._descriptor).st_size == 0, "the disk has its room back"


def test_room_is_reserved_when_it_is_kept(store: DiskStore) -> None:
    store.keep(1 << 20, torch.uint8)
    assert os.fstat(store.file._descriptor).st_blocks * 512 >= 1 << 20
    assert store.capacity_bytes >= 1 << 20


def test_a_disk_that_is_too_small_is_said_before_anything_is_taken(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = store.keep(10, torch.float32)
    asked: list[int] = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *arguments: asked.append(1))
    with pytest.raises(OffloadError, match=r"too little room: [\d,.]+ GiB more are needed, [\d,.]+ GiB are free; make"):
        store.keep(1 << 50, torch.uint8)
    assert not asked
    assert store.nbytes == kept.nbytes


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (errno.ENOSPC, "has too little room"),
        (errno.EDQUOT, "has too little room"),
        (errno.EIO, r"reserve room .*EIO"),
    ],
)
def test_room_that_cannot_be_reserved_leaves_the_file_as_it_was(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, number: int, text: str
) -> None:
    kept = store.keep(5000, torch.uint8)
    real = os.posix_fallocate

    def fail(descriptor: int, offset: int, nbytes: int) -> None:
        real(descriptor, offset, 4096)  # A part of it is taken before the disk is full.
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", fail)
        with pytest.raises(OffloadError, match=text):
            store.keep(50_000, torch.uint8)
    assert os.fstat(store.file._descriptor).st_size == 8192
    values = noise(50_000, torch.uint8)
    later = store.keep(50_000, torch.uint8)
    put(later, values)
    assert same(got(later), values)
    assert not got(kept).any()


def test_a_file_system_that_cannot_reserve_is_believed(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "")

    monkeypatch.setattr(os, "posix_fallocate", fail)
    kept, values = store.keep(50_000, torch.uint8), noise(50_000, torch.uint8)
    put(kept, values)
    assert same(got(kept), values)


# ---- failures --------------------------------------------------------------------------------------------------------


def fails(number: int) -> Callable[..., int]:
    def fail(*arguments: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.mark.parametrize(("number", "remedy"), [(errno.EIO, "check the disk"), (errno.ENOSPC, "make room there")])
def test_a_write_behind_that_failed_is_said_at_every_later_use(
    store: DiskStore, monkeypatch: pytest.MonkeyPatch, number: int, remedy: str
) -> None:
    kept, other = store.keep(20_000, torch.float32), store.keep(5, torch.float32)
    text = rf"write states to .*{store.folder.name}.*{errno.errorcode[number]}.*{remedy}.* the last checkpoint"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", fails(number))
        put(kept, torch.ones(20_000))
        with pytest.raises(OffloadError, match=text):
            store.flush()
    into = torch.empty(3)
    uses = [kept.fetch, partial(kept.read, into), partial(kept.write, into), store.flush, other.fetch]
    for use in (*uses, partial(store.keep, 5, torch.uint8)):
        with pytest.raises(OffloadError, match=text):
            use()
    kept.drop()
    put(other, torch.ones(5))
    store.flush()
    assert got(other).tolist() == [1] * 5, "once the lost one is dropped, the others go on"


def test_what_was_started_before_a_write_failed_fails_too(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = store.keep(20_000, torch.float32)
    reached, opened = threading.Event(), threading.Event()

    def fail(*arguments: Any) -> int:
        reached.set()
        assert opened.wait(FAR)
        raise OSError(errno.EIO, "")

    monkeypatch.setattr(os, "pwritev", fail)
    write = kept.write(torch.ones(20_000))
    assert reached.wait(FAR)
    read, fetched = kept.read(torch.empty(20_000)), kept.fetch()
    opened.set()
    for transfer in (write, read, fetched, fetched):
        with pytest.raises(OffloadError, match="EIO"):
            transfer.wait()
    with pytest.raises(OffloadError, match="EIO"):
        _ = kept.tensor
    with pytest.raises(OffloadError, match="EIO"):
        kept.leave(changed=True)
    kept.leave(changed=False)


def test_a_read_that_failed_can_be_tried_again(store: DiskStore, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, values = store.keep(20_000, torch.float32), noise(20_000, torch.float32)
    put(kept, values)
    store.flush()
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", fails(errno.EIO))
        fetched = kept.fetch()
        with pytest.raises(OffloadError, match=r"read states from .*EIO.*the last checkpoint"):
            fetched.wait()
    with pytest.raises(OffloadError, match="EIO"):
        kept.leave(changed=True)
    kept.leave(changed=False)
    kept.fetch().wait()
    assert same(kept.tensor, values)


def test_a_file_that_ends_too_early_is_an_error(store: DiskStore) -> None:
    kept = store.keep(20_000, torch.float32)
    put(kept, torch.ones(20_000))
    store.flush()
    os.ftruncate(store.file._descriptor, 8192)
    with pytest.raises(OffloadError, match=r"not one page of .* was transferred"):
        kept.fetch().wait()


@pytest.mark.parametrize("most", [4096, 5000])
def test_short_transfers_are_gone_on_with(store: DiskStore, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The system may transfer less than it is asked for; with O_DIRECT one can only go on at a page."""
    counts = {"preadv": 0, "pwritev": 0}
    for name in counts:
        real = getattr(os, name)

        def short(*arguments: Any, name: str = name, real: Any = real) -> int:
            counts[name] += 1
            return min(real(*arguments), most)

        monkeypatch.setattr(os, name, short)
    kept, values = store.keep(2 * CHUNK, torch.uint8), noise(2 * CHUNK, torch.uint8)
    put(kept, values)
    kept.fetch().wait()
    assert same(kept.tensor, values)
    assert min(counts.values()) >= 4


# ---- interrupts, the end ---------------------------------------------------------------------------------------------


class Interrupting(CommStats):
    """Ctrl-C comes while somebody waits, once `armed`."""

    armed: Callable[[], object] | None = None

    def waited(self, wait: Callable[[], Any], device: torch.device, link: str = "") -> None:
        armed, self.armed = self.armed, None
        if armed is not None:
            armed()
        super().waited(wait, device, link)


def interrupt_after(ready: Callable[[], object]) -> None:
    """Ctrl-C for the main thread once `ready` returns."""

    def act() -> None:
        ready()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=act).start()


def test_an_interrupted_wait_leaves_the_store_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Interrupting()
    store = make(tmp_path, traffic=traffic)
    kept, values = store.keep(20_000, torch.float32), noise(20_000, torch.float32)
    put(kept, values)
    store.flush()
    gate = Gate(monkeypatch, "preadv")
    fetched = kept.fetch()
    waiting = threading.Event()
    interrupt_after(waiting.wait)
    traffic.armed = waiting.set
    with pytest.raises(KeyboardInterrupt):
        fetched.wait()
    with pytest.raises(RuntimeError, match="wait for the transfer"):
        kept.leave(changed=True)
    kept.leave(changed=False)
    gate.opened.set()
    kept.fetch().wait()
    assert same(kept.tensor, values)
    store.close()


def test_an_interrupted_close_can_be_called_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = make(tmp_path)
    kept = store.keep(20_000, torch.float32)
    put(kept, torch.ones(20_000))
    store.flush()
    gate, giving_up = Gate(monkeypatch, "preadv"), threading.Event()
    kept.fetch()
    assert gate.reached.wait(FAR)
    settle = IORequest.settle
    monkeypatch.setattr(IORequest, "settle", lambda job: (giving_up.set(), settle(job)))
    interrupt_after(giving_up.wait)
    with pytest.raises(KeyboardInterrupt):
        store.close()
    gate.opened.set()
    store.close()
    assert store.file.close.alive is False


@pytest.mark.parametrize("end", ["close", "drop"])
def test_what_is_under_way_fails_when_given_up(store: DiskStore, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    kept = store.keep(40 * CHUNK, torch.uint8)
    put(kept, noise(kept.numel, torch.uint8))
    store.flush()
    gate = Gate(monkeypatch, "preadv")
    open_turn, following = kept.fetch(), kept.read(torch.empty(40 * CHUNK, dtype=torch.uint8))
    assert gate.reached.wait(FAR)
    ending = threading.Thread(target=store.close if end == "close" else kept.drop)
    giving_up, settle = threading.Event(), IORequest.settle
    monkeypatch.setattr(IORequest, "settle", lambda job: (giving_up.set(), settle(job)))
    ending.start()
    assert giving_up.wait(FAR)
    gate.opened.set()
    ending.join(FAR)
    assert not ending.is_alive()
    assert gate.calls <= 3, "what has not begun is left out"
    for transfer in (open_turn, following):
        with pytest.raises(OffloadError, match="dropped"):
            transfer.wait()
    with pytest.raises(OffloadError, match="is closed; make a new one" if end == "close" else "was dropped"):
        kept.fetch()
    kept.drop()


def descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except OSError:  # The one that listed them.
            continue
    return found


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    before, threads = descriptors(), set(threading.enumerate())
    store = make(tmp_path)
    kept = store.keep(20_000, torch.float32)
    put(kept, torch.ones(20_000))
    kept.fetch()
    assert len(descriptors()) == len(before) + 1
    assert len(set(threading.enumerate()) - threads) == 3
    assert os.listdir(tmp_path) == []
    store.close()
    store.close()
    assert descriptors() == before
    assert set(threading.enumerate()) == threads


def test_memory_of_what_is_over_is_let_go(store: DiskStore) -> None:
    kept, array, gone = store.keep(100, torch.float32), np.empty(100, dtype=np.float32), threading.Event()
    weakref.finalize(array, gone.set)
    transfer = kept.read(torch.from_numpy(array))
    transfer.wait()
    del array
    assert gone.wait(FAR), "neither the transfer nor the threads keep the memory"
    assert transfer.over
