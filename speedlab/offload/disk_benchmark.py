"""Measure the speed of a disk for states, and the best number of parallel transfers."""

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
"""(threads, chunk bytes) to try; the default first."""
_SMALLEST_BYTES, _LARGEST_BYTES = 8 << 20, 256 << 20
"""Limits for the size of the measured state."""
_ROUNDS = 2
"""Measured reads and writes per setting."""
_WORTH = 1.05
"""A later setting wins only if it is faster by this factor."""

_KNOWN: dict[int, DiskSpeed] = {}
"""Results of this process, by device number of the file system."""


@dataclass(frozen=True, kw_only=True)
class DiskSpeed:
    """The speed of the best setting."""

    read_bytes_per_second: float
    write_bytes_per_second: float
    threads: int
    chunk_bytes: int
    direct: bool
    """Whether this is the speed of the disk itself. Without O_DIRECT the page cache takes part."""

    @property
    def both_bytes_per_second(self) -> float:
        """Bytes per second of reading and writing equal amounts, one after the other."""
        return 2 / (1 / self.read_bytes_per_second + 1 / self.write_bytes_per_second)


def measure_disk(folder: Path, *, seconds: float = 2.0) -> DiskSpeed:
    """Measure reads and writes in a folder with several settings. No file remains. One measurement per file system and
    process.

    Args:
        folder: An existing folder on the disk.
        seconds: Approximate duration.

    Raises:
        OffloadError: The folder cannot be used.
    """
    # A missing folder has no device number; DiskStore then raises the error.
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
    """Measure one setting with a state of `nbytes`, a multiple of 1 MiB."""
    store = DiskStore(
        folder, rank=0, traffic=CommStats(), device=torch.device("cpu"), threads=threads, chunk_bytes=chunk_bytes
    )
    try:
        kept = store.keep(nbytes, torch.uint8)
        kept.fetch(values=False).wait()
        # Random bytes, because some disks write zeros faster.
        noise = torch.frombuffer(bytearray(os.urandom(1 << 20)), dtype=torch.uint8)
        kept.tensor.view(-1, noise.numel()).copy_(noise)
        kept.leave(changed=True)
        store.flush()  # Not measured: at the first write, the file system also allocates blocks.
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
