"""How fast a disk is for states, and with how many transfers at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from speedlab.comm import CommStats
from speedlab.offload.disk_store import CHUNK_BYTES, THREADS, DiskStore

_WAYS = ((THREADS, CHUNK_BYTES), (2, 4 << 20), (4, 4 << 20), (8, 1 << 20), (16, 1 << 20))
"""(threads, bytes of a chunk) to try, what is used unmeasured first."""
_SMALLEST_BYTES, _LARGEST_BYTES = 8 << 20, 256 << 20
"""Of the state that is written and read."""
_ROUNDS = 2
"""Reads and writes of the state that are counted, for each way."""
_WORTH = 1.05
"""More threads are taken when they are faster by this factor."""

_KNOWN: dict[int, DiskSpeed] = {}
"""What this process has measured, by the file system's number."""


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """Of the best way that was tried."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    threads: int
    chunk_bytes: int
    direct: bool
    """Whether it is the disk's own speed: without O_DIRECT the page cache takes part."""

    @property
    def both_bytes_per_second(self) -> float:
        """Of reading as much as is written, one after the other."""
        return 2 / (1 / self.read_bytes_per_second + 1 / self.write_bytes_per_second)


def measure_disk(folder: Path, *, seconds: float = 2.0) -> DiskSpeed:
    """Write and read states in `folder` for about so long, in several ways; nothing is left there.

    Measured once for each file system and process. Raises OffloadError where the folder is of no use.
    """
    # A folder that is none has no number; making the store says so.
    device = folder.stat().st_dev if folder.is_dir() else -1
    if device not in _KNOWN:
        _KNOWN[device] = _measure(folder, seconds)
    return _KNOWN[device]


def _measure(folder: Path, seconds: float) -> DiskSpeed:
    started = time.perf_counter()
    probe = _speed(folder, *_WAYS[0], _SMALLEST_BYTES)
    share = probe.both_bytes_per_second * seconds / (len(_WAYS) * (2 * _ROUNDS + 1))
    nbytes = int(min(max(share, _SMALLEST_BYTES), _LARGEST_BYTES)) >> 20 << 20
    best = probe
    for threads, chunk_bytes in _WAYS:
        if time.perf_counter() - started > seconds:
            break
        found = _speed(folder, threads, chunk_bytes, nbytes)
        if best is probe or found.both_bytes_per_second > _WORTH * best.both_bytes_per_second:
            best = found
    return best


def _speed(folder: Path, threads: int, chunk_bytes: int, nbytes: int) -> DiskSpeed:
    """Of a state of `nbytes`, a multiple of 1 MiB."""
    store = DiskStore(
        folder, rank=0, traffic=CommStats(), device=torch.device("cpu"), threads=threads, chunk_bytes=chunk_bytes
    )
    try:
        kept = store.keep(nbytes, torch.uint8)
        kept.fetch(values=False).wait()
        noise = torch.frombuffer(bytearray(os.urandom(1 << 20)), dtype=torch.uint8)  # Some disks are faster with zeros.
        kept.tensor.view(-1, noise.numel()).copy_(noise)
        kept.leave(changed=True)
        store.flush()  # Not counted: the first time, the file system also notes what has been written.
        was_read = written = 0.0
        for _ in range(_ROUNDS):
            was_read += _seconds(lambda: kept.fetch().wait())
            written += _seconds(lambda: (kept.leave(changed=True), store.flush()))
    finally:
        store.close()
    return DiskSpeed(
        read_bytes_per_second=_ROUNDS * nbytes / was_read,
        write_bytes_per_second=_ROUNDS * nbytes / written,
        threads=threads,
        chunk_bytes=chunk_bytes,
        direct=store.file.direct,
    )


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
