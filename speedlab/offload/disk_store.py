"""States in a file of this rank, read and written by a few threads in pieces.

1. `keep` reserves a stretch of the file in whole pages, so that a disk which is too small is found before a step.
2. A turn has a buffer of whole pages. `fetch` reads the stretch into it, in chunks, on all threads; `leave` writes it
   back behind the caller, or only gives the buffer back.
3. `read` and `write` go straight between the file and memory that O_DIRECT takes; other memory, and stretches that
   begin or end inside a page, go through staging chunk by chunk. Of a page that is written in part, the rest is read
   first.
4. What is started of one state runs in the order in which it was started (its `IOQueue`); states run side by side.
5. A write that failed spoils its state: everything later says so, also the next `fetch`, `read` or `flush` of any
   other, until the state is dropped.
"""

from __future__ import annotations

import queue
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from speedlab.comm import CommStats, Transfer
from speedlab.offload.anonymous_file import AnonymousFile
from speedlab.offload.file_allocator import FileAllocator
from speedlab.offload.io_queue import IOQueue, IORequest, IOThreadPool, Piece
from speedlab.offload.staging_buffers import (
    PAGE_BYTES,
    BufferPool,
    DeviceMemory,
    HostMemory,
    StagedMemory,
    Zeros,
    rounded,
)
from speedlab.offload.store import OffloadedState, OffloadError, StateStore
from speedlab.placement import MemoryKind

READ, WRITE = "disk read", "disk write"
"""The links under which bytes are counted."""

THREADS, CHUNK_BYTES = 4, 1 << 20
"""Where nobody has measured: how many transfers the disk has at a time, and of how many bytes."""

_CPU = torch.device("cpu")


class DiskStore(StateStore):
    """The states that a rank keeps on disk."""

    where = MemoryKind.DISK

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        traffic: CommStats,
        device: torch.device,
        threads: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """`folder`: on the disk. `device`: whose tensors are read and written beside those of the host. `threads` and
        `chunk_bytes`: as `measure_disk` finds them, or what does for most disks. Raises OffloadError where the folder
        is of no use, ValueError for chunks that are not whole pages."""
        if chunk_bytes < PAGE_BYTES or chunk_bytes % PAGE_BYTES:
            raise ValueError(f"chunk_bytes is {chunk_bytes}; expected a multiple of {PAGE_BYTES}")
        if sys.platform != "linux":
            raise OffloadError(f"offload: states go to disk on Linux only, this is {sys.platform}; keep them on host")
        super().__init__()
        self.folder, self.chunk_bytes = folder, chunk_bytes
        self._traffic = traffic
        self.file = AnonymousFile(folder, rank)
        self._room = FileAllocator(self.file)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.buffers = BufferPool(self.staging_meter, pinned=self._stream is not None)
        threads = threads or THREADS
        self.chunks: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        """One chunk for each thread, so that none ever waits for it."""
        for _ in range(threads):
            self.chunks.put(self.buffers.take(chunk_bytes))
        self._kept: list[DiskState] = []
        self._closed = False
        self._pool = IOThreadPool(threads, f"offload-{rank}")

    def keep(self, numel: int, dtype: torch.dtype) -> DiskState:
        self.check()
        kept = DiskState(self, self._room, IOQueue(self._pool), numel, dtype)
        self._kept.append(kept)
        return kept

    def flush(self) -> None:
        for kept in list(self._kept):
            kept.settle()
        self.check()

    @property
    def in_memory(self) -> list[Tensor]:
        return self.buffers.all

    @property
    def sound(self) -> bool:
        return all(kept.spoiled is None for kept in self._kept)

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self._kept)

    @property
    def capacity_bytes(self) -> int:
        """What the file takes on the disk, and what is free there: other ranks' share, too."""
        return self._room.size + self.file.free_bytes

    def close(self) -> None:
        """Can be called again when it was interrupted."""
        self._closed = True
        if not self.file.close.alive:
            return
        for kept in list(self._kept):
            kept.drop()
        self._pool.close()
        self.buffers.close()
        self.file.close()

    # ---- for its states ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises OffloadError when it is closed, or a write of some state has failed."""
        if self._closed:
            raise OffloadError(f"offload: the store in {self.folder} is closed; make a new one")
        for kept in self._kept:
            if kept.spoiled is not None:
                raise OffloadError(str(kept.spoiled)) from kept.spoiled

    def forget(self, kept: DiskState) -> None:
        self._kept.remove(kept)

    def memory(self, tensor: Tensor, start_bytes: int) -> StagedMemory:
        """`tensor` as the bytes of a state from `start_bytes` on."""
        if tensor.device.type == "cpu":
            return HostMemory(tensor, start_bytes)
        if self._stream is None:
            raise ValueError(f"offload: a tensor on {tensor.device}, in a store that was made for CPU tensors")
        return DeviceMemory(tensor, start_bytes, self._stream)

    def transfer(self, job: IORequest, link: str, nbytes: int) -> Transfer:
        # The host waits for the disk, so it is timed by the clock on every device.
        return Transfer(job.wait, self._traffic, _CPU, link=link, nbytes=nbytes, over=lambda: job.over)

    def count(self, link: str, nbytes: int) -> None:
        self._traffic.sent("", link, nbytes)


class _DiskVisit(NamedTuple):
    buffer: Tensor
    fetched: IORequest
    left: IORequest


class DiskState(OffloadedState):
    """A state in a stretch of the file."""

    where = MemoryKind.DISK

    def __init__(self, store: DiskStore, room: FileAllocator, chain: IOQueue, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype
        self._store, self._room, self._chain = store, room, chain
        self._extent = room.take(self.nbytes)
        self._dropped = False
        self._blank = True
        """Nothing has been written since `keep`: it is zeros, whatever stands in the file. Asked when a job begins."""
        self._turns: deque[_DiskVisit] = deque()
        """Those that are open; more than one where somebody has fetched ahead of a `leave`."""
        self._last_write: IORequest | None = None
        self.spoiled: OffloadError | None = None
        """Why it is lost."""

    # ---- turns -------------------------------------------------------------------------------------------------------

    def fetch(self, *, values: bool = True) -> Transfer:
        self._check()
        buffer = self._store.buffers.take(self._extent.nbytes)
        memory = HostMemory(buffer)
        fetched = IORequest(partial(self._reading, memory, 0, self._extent.nbytes) if values else list)
        left = IORequest(None, ended=partial(self._left, buffer))
        self._turns.append(_DiskVisit(buffer, fetched, left))
        self._chain.add(fetched, left)
        return self._store.transfer(fetched, READ, self.nbytes if values else 0)

    @property
    def tensor(self) -> Tensor:
        turn = self._turn()
        if not turn.fetched.over:
            raise RuntimeError("offload: wait for the transfer of `fetch` before the state is used or left as changed")
        turn.fetched.wait()  # It is over: this raises what it failed with.
        return turn.buffer[: self.nbytes].view(self.dtype)

    def leave(self, *, changed: bool) -> None:
        """Raises what the transfer of `fetch` raises when it is `changed` all the same; the turn is open then."""
        turn = self._turn()
        if changed:
            _ = self.tensor
            self._store.count(WRITE, self.nbytes)
            self._last_write = turn.left
            self._chain.release(turn.left, partial(self._writing, HostMemory(turn.buffer), 0, self._extent.nbytes))
        else:
            self._chain.release(turn.left, list)
        self._turns.popleft()

    def _turn(self) -> _DiskVisit:
        if not self._turns:
            raise RuntimeError("offload: the state is not here; `fetch` it first")
        return self._turns[0]

    def _left(self, buffer: Tensor, error: Exception | None) -> None:
        self._store.buffers.give_back(buffer)
        self._written(error)

    # ---- stretches ---------------------------------------------------------------------------------------------------

    def read(self, into: Tensor, start: int = 0) -> Transfer:
        low, high = self._stretch(into, start)
        self._check()
        job = IORequest(partial(self._reading, self._store.memory(into, low), low, high))
        self._chain.add(job)
        return self._store.transfer(job, READ, into.nbytes)

    def write(self, source: Tensor, start: int = 0) -> Transfer:
        low, high = self._stretch(source, start)
        self._check()
        job = IORequest(partial(self._writing, self._store.memory(source, low), low, high), ended=self._written)
        self._last_write = job
        self._chain.add(job)
        return self._store.transfer(job, WRITE, source.nbytes)

    def _stretch(self, tensor: Tensor, start: int) -> tuple[int, int]:
        """[low, high) in bytes of the state."""
        fits = 0 <= start <= self.numel - tensor.numel()
        if tensor.dtype != self.dtype or not tensor.is_contiguous() or not fits:
            raise ValueError(
                f"offload: {tensor.numel()} elements of {tensor.dtype} from element {start} on, of a state of "
                f"{self.numel} elements of {self.dtype}; expected a contiguous tensor of that dtype that lies within"
            )
        return start * self.dtype.itemsize, (start + tensor.numel()) * self.dtype.itemsize

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Can be called again when it was interrupted. What is under way fails."""
        if self._dropped:
            return
        self._chain.give_up(OffloadError("offload: the state was dropped"))
        self._turns.clear()
        self._dropped = True
        self._room.give_back(self._extent)
        self._store.forget(self)

    def settle(self) -> None:
        """Wait until all that was left or written is in its place, or cannot be."""
        self._chain.kick()  # Ctrl-C may have come before it was told.
        if self._last_write is not None:
            self._last_write.settle()

    def _check(self) -> None:
        self._store.check()
        if self._dropped:
            raise OffloadError("offload: the state was dropped; `keep` a new one")

    # ---- on the threads of the store ---------------------------------------------------------------------------------

    def _reading(self, memory: StagedMemory, low: int, high: int) -> Iterator[Piece]:
        if self._blank:
            return self._pieces(partial(_put_zeros, memory), low, high)
        return self._pieces(partial(self._load, memory), low, high)

    def _writing(self, memory: StagedMemory, low: int, high: int) -> Iterator[Piece]:
        blank, self._blank = self._blank, False
        yield from self._pieces(partial(self._save, memory, blank), low, high)
        if blank and not self._extent.fresh:  # Around it, the file still has what somebody else left there.
            for start, stop in ((0, low // PAGE_BYTES * PAGE_BYTES), (rounded(high), self._extent.nbytes)):
                yield from self._pieces(partial(self._save, Zeros(), True), start, stop)

    def _written(self, error: Exception | None) -> None:
        """A write has ended, or failed with `error`."""
        if error is None or self._chain.error is not None:
            return
        self.spoiled = error if isinstance(error, OffloadError) else OffloadError(f"offload: a write failed: {error!r}")
        self._chain.error = self.spoiled

    def _pieces(self, move: Callable[[int, int], object], low: int, high: int) -> Iterator[Piece]:
        """[low, high) cut where chunks of the state begin."""
        chunk = self._store.chunk_bytes
        while low < high:
            stop = min(high, (low // chunk + 1) * chunk)
            yield partial(move, low, stop)
            low = stop

    def _load(self, memory: StagedMemory, low: int, high: int) -> None:
        """From the file: at most a chunk."""
        file, at = self._store.file, self._extent.offset
        straight = memory.straight(low, high, direct=file.direct)
        if straight is not None:
            file.read(straight, at + low)
            return
        start, stop = low // PAGE_BYTES * PAGE_BYTES, rounded(high)
        staged = self._store.chunks.get()
        try:
            file.read(_view(staged[: stop - start]), at + start)
            memory.put(low, high, staged[low - start : high - start])
        finally:
            self._store.chunks.put(staged)

    def _save(self, memory: StagedMemory, blank: bool, low: int, high: int) -> None:
        """To the file: at most a chunk. `blank`: what else is in its pages becomes zeros."""
        file, at = self._store.file, self._extent.offset
        straight = memory.straight(low, high, direct=file.direct or blank)
        if straight is not None:
            file.write(straight, at + low)
            return
        start, stop = low // PAGE_BYTES * PAGE_BYTES, rounded(high)
        staged = self._store.chunks.get()
        try:
            edges = {start} if low > start else set()
            if high < min(stop, self.nbytes):  # What follows the state in its last page is nobody's.
                edges.add(stop - PAGE_BYTES)
            for edge in edges:
                page = staged[edge - start : edge - start + PAGE_BYTES]
                if blank:
                    page.zero_()
                else:
                    file.read(_view(page), at + edge)
            memory.take(low, high, staged[low - start : high - start])
            file.write(_view(staged[: stop - start]), at + start)
        finally:
            self._store.chunks.put(staged)


def _put_zeros(memory: StagedMemory, low: int, high: int) -> None:
    memory.put(low, high, torch.zeros(high - low, dtype=torch.uint8))


def _view(staged: Tensor) -> memoryview:
    return staged.numpy().data
