"""States in a file of this rank. A few threads read and write in chunks.

1. `keep` reserves full pages of the file, so that a disk that is too small raises before the first step.
2. A turn uses a buffer of full pages. `fetch` reads the state into the buffer, in chunks, on all threads. `leave`
   writes the buffer back in the background, or only frees it.
3. `read` and `write` transfer directly if O_DIRECT accepts the memory. Otherwise, and for ranges that start or end
   inside a page, chunks go through staging buffers. A page that is written only in part is read first.
4. Operations of one state run in order (its `IOQueue`); different states run in parallel.
5. A failed write spoils its state. Then every later operation raises, also `fetch`, `read` and `flush` of other
   states, until the spoiled state is dropped.
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
"""Link names under which bytes are counted."""

THREADS, CHUNK_BYTES = 4, 1 << 20
"""Defaults without a measurement: number of parallel transfers, and bytes per transfer."""

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
        """Create the file and the threads.

        Args:
            folder: An existing folder on the disk.
            rank: Global rank, for names.
            traffic: Counts transfers and buffers.
            device: Tensors of this device can be read and written, in addition to host tensors.
            threads: Number of parallel transfers, from `measure_disk`; None: THREADS.
            chunk_bytes: Bytes per transfer, a multiple of PAGE_BYTES.

        Raises:
            OffloadError: The folder cannot be used, or the system is not Linux.
            ValueError: `chunk_bytes` is not a multiple of full pages.
        """
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
        """One staging chunk per thread, so that no thread waits for a chunk."""
        for _ in range(threads):
            self.chunks.put(self.buffers.take(chunk_bytes))
        self._kept: list[DiskState] = []
        self._closed = False
        self._pool = IOThreadPool(threads, f"offload-{rank}")

    def keep(self, numel: int, dtype: torch.dtype) -> DiskState:
        """Reserve an extent of the file for a state of zeros.

        Args:
            numel: Number of elements.
            dtype: Their dtype.

        Raises:
            OffloadError: The disk is full, the store is closed, or a write has failed.
        """
        self.check()
        kept = DiskState(self, self._room, IOQueue(self._pool), numel, dtype)
        self._kept.append(kept)
        return kept

    def flush(self) -> None:
        """Wait for all writes. Raises OffloadError if one failed."""
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
        """Bytes of the file plus free bytes of the disk, which other ranks may use too."""
        return self._room.size + self.file.free_bytes

    def close(self) -> None:
        """Drop all states, end the threads and delete the file. Safe to call again after an interruption."""
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
        """Raise OffloadError if the store is closed or a write of any state failed."""
        if self._closed:
            raise OffloadError(f"offload: the store in {self.folder} is closed; make a new one")
        for kept in self._kept:
            if kept.spoiled is not None:
                raise OffloadError(str(kept.spoiled)) from kept.spoiled

    def forget(self, kept: DiskState) -> None:
        """Remove a dropped state from the list."""
        self._kept.remove(kept)

    def memory(self, tensor: Tensor, start_bytes: int) -> StagedMemory:
        """Return a tensor as bytes of a state.

        Args:
            tensor: A contiguous tensor on the host or the device.
            start_bytes: Its first byte in the state.

        Raises:
            ValueError: The tensor is on a GPU, but the store was created for CPU tensors.
        """
        if tensor.device.type == "cpu":
            return HostMemory(tensor, start_bytes)
        if self._stream is None:
            raise ValueError(f"offload: a tensor on {tensor.device}, in a store that was made for CPU tensors")
        return DeviceMemory(tensor, start_bytes, self._stream)

    def transfer(self, job: IORequest, link: str, nbytes: int) -> Transfer:
        # The host waits for the disk, so the host's clock measures this on every device.
        """Return a job as a transfer that counts its bytes.

        Args:
            job: The job to wait for.
            link: Name under which the bytes count.
            nbytes: Bytes that the job transfers.
        """
        return Transfer(job.wait, self._traffic, _CPU, link=link, nbytes=nbytes, over=lambda: job.over)

    def count(self, link: str, nbytes: int) -> None:
        """Count bytes of a background write."""
        self._traffic.sent("", link, nbytes)


class _DiskVisit(NamedTuple):
    buffer: Tensor
    fetched: IORequest
    left: IORequest


class DiskState(OffloadedState):
    """A state in an extent of the file."""

    where = MemoryKind.DISK

    def __init__(self, store: DiskStore, room: FileAllocator, chain: IOQueue, numel: int, dtype: torch.dtype) -> None:
        self.numel, self.dtype = numel, dtype
        self._store, self._room, self._chain = store, room, chain
        self._extent = room.take(self.nbytes)
        self._dropped = False
        self._blank = True
        """Whether nothing was written since `keep`: the state is zeros, whatever the file contains. Read when a job
        starts."""
        self._turns: deque[_DiskVisit] = deque()
        """Open turns. There are several if a caller fetches before the previous `leave`."""
        self._last_write: IORequest | None = None
        self.spoiled: OffloadError | None = None
        """The failed write that lost the values."""

    # ---- turns -------------------------------------------------------------------------------------------------------

    def fetch(self, *, values: bool = True) -> Transfer:
        """Start a turn: start to read the extent into a buffer.

        Args:
            values: If False, only take a buffer, which the caller fills.

        Raises:
            OffloadError: The store is closed, the state is dropped, or a write has failed.
        """
        self._check()
        buffer = self._store.buffers.take(self._extent.nbytes)
        memory = HostMemory(buffer)
        fetched = IORequest(partial(self._reading, memory, 0, self._extent.nbytes) if values else list)
        # Blocks the queue until `leave`, so that later operations see the state after this turn.
        left = IORequest(None, ended=partial(self._left, buffer))
        self._turns.append(_DiskVisit(buffer, fetched, left))
        self._chain.add(fetched, left)
        return self._store.transfer(fetched, READ, self.nbytes if values else 0)

    @property
    def tensor(self) -> Tensor:
        turn = self._turn()
        if not turn.fetched.over:
            raise RuntimeError("offload: wait for the transfer of `fetch` before the state is used or left as changed")
        turn.fetched.wait()  # The job has ended, so this only raises its error.
        return turn.buffer[: self.nbytes].view(self.dtype)

    def leave(self, *, changed: bool) -> None:
        """End the turn.

        Args:
            changed: Whether to write the values back, in the background.

        Raises:
            RuntimeError: No turn is open, or its `fetch` has not ended.
            OffloadError: `changed`, but the `fetch` failed. The turn stays open.
        """
        turn = self._turn()
        if changed:
            # Raises if the `fetch` failed or has not ended: such a buffer must not overwrite the file.
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
        """Start to read elements [start, start + m).

        Args:
            into: (m,), contiguous, of this dtype.
            start: First element.

        Raises:
            OffloadError: The store is closed, the state is dropped, or a write has failed.
            ValueError: `into` does not fit.
        """
        low, high = self._stretch(into, start)
        self._check()
        job = IORequest(partial(self._reading, self._store.memory(into, low), low, high))
        self._chain.add(job)
        return self._store.transfer(job, READ, into.nbytes)

    def write(self, source: Tensor, start: int = 0) -> Transfer:
        """Start to write elements [start, start + m).

        Args:
            source: (m,), contiguous, of this dtype. Do not change it before the end of the transfer.
            start: First element.

        Raises:
            OffloadError: The store is closed, the state is dropped, or a write has failed.
            ValueError: `source` does not fit.
        """
        low, high = self._stretch(source, start)
        self._check()
        job = IORequest(partial(self._writing, self._store.memory(source, low), low, high), ended=self._written)
        self._last_write = job
        self._chain.add(job)
        return self._store.transfer(job, WRITE, source.nbytes)

    def _stretch(self, tensor: Tensor, start: int) -> tuple[int, int]:
        """Return [low, high) in bytes of the state."""
        fits = 0 <= start <= self.numel - tensor.numel()
        if tensor.dtype != self.dtype or not tensor.is_contiguous() or not fits:
            raise ValueError(
                f"offload: {tensor.numel()} elements of {tensor.dtype} from element {start} on, of a state of "
                f"{self.numel} elements of {self.dtype}; expected a contiguous tensor of that dtype that is within"
            )
        return start * self.dtype.itemsize, (start + tensor.numel()) * self.dtype.itemsize

    # ---- the end -----------------------------------------------------------------------------------------------------

    def drop(self) -> None:
        """Free the extent. Pending operations fail. Safe to call again after an interruption."""
        if self._dropped:
            return
        self._chain.give_up(OffloadError("offload: the state was dropped"))
        self._turns.clear()
        self._dropped = True
        self._room.give_back(self._extent)
        self._store.forget(self)

    def settle(self) -> None:
        """Wait until the last write has ended or failed."""
        self._chain.kick()  # Ctrl-C may have interrupted the call that should have notified the pool.
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
        if blank and not self._extent.fresh:  # The rest of the extent still contains data of an earlier state.
            for start, stop in ((0, low // PAGE_BYTES * PAGE_BYTES), (rounded(high), self._extent.nbytes)):
                yield from self._pieces(partial(self._save, Zeros(), True), start, stop)

    def _written(self, error: Exception | None) -> None:
        """Handle the end of a write: a failed write spoils the state."""
        if error is None or self._chain.error is not None:
            return
        self.spoiled = error if isinstance(error, OffloadError) else OffloadError(f"offload: a write failed: {error!r}")
        self._chain.error = self.spoiled

    def _pieces(self, move: Callable[[int, int], object], low: int, high: int) -> Iterator[Piece]:
        """Yield one job piece per chunk of [low, high)."""
        chunk = self._store.chunk_bytes
        while low < high:
            stop = min(high, (low // chunk + 1) * chunk)
            yield partial(move, low, stop)
            low = stop

    def _load(self, memory: StagedMemory, low: int, high: int) -> None:
        """Read at most one chunk from the file."""
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
        """Write at most one chunk to the file. With `blank`, the rest of its pages becomes zeros."""
        file, at = self._store.file, self._extent.offset
        straight = memory.straight(low, high, direct=file.direct or blank)
        if straight is not None:
            file.write(straight, at + low)
            return
        start, stop = low // PAGE_BYTES * PAGE_BYTES, rounded(high)
        staged = self._store.chunks.get()
        try:
            edges = {start} if low > start else set()
            # Bytes after the end of the state belong to no state, so they need not be read first.
            if high < min(stop, self.nbytes):
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
