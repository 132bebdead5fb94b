"""A tensor whose shards are owned by the ranks of one host. Every rank maps all shards, so it has the whole without a
copy.

1. A shard begins at the same offset of a page in its owner's memory as in the whole. So all pages of one rank only are
   mapped. Pages with parts of two shards are private, and their few bytes are copied.
2. Pages are mapped privately: a write to the whole goes to a copy of the page that no other rank sees. The system
   reports which pages are such copies (pagemap). They are dropped when the whole is gathered again, so that it has the
   owners' values.
3. Values are those in the owners' memory. No owner writes while a peer holds the whole (`SyncPage.hold`).
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from ctypes import memmove
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from speedlab.comm.shared.memfd import NORESERVE, Mapping, create_file, drop_copies, map_over, remap
from speedlab.comm.shared.sync_page import SyncPage

_PAGE = mmap.PAGESIZE
_ENTRY = 8
"""Bytes of a pagemap entry, one per page."""

_KIND, _FROM_FILE = 61, 1
"""Bits 63 to 61 of such an entry: "present", "swapped", and "of a file, or shared"."""


class MappedArena(Protocol):
    """An arena of this process or of another one."""

    def address(self, extent: int, offset: int) -> int:
        """Return the address of a byte of an extent; see `PeerMemory.address`."""
        ...

    def map_at(self, address: int, nbytes: int, extent: int, offset: int) -> None:
        """Map pages at another address; see `PeerMemory.map_at`."""
        ...


class _ShardPages:
    """One rank's shard in the whole, at [start, end); [low, high) are pages of this shard only."""

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.end = start, start + nbytes
        self.low = min(-(-self.start // _PAGE) * _PAGE, self.end)
        self.high = max(self.end // _PAGE * _PAGE, self.low)
        self.mapped: tuple[MappedArena, int, int] | None = None
        """What is mapped here: (memory, extent, offset)."""
        self._torn = False
        """Whether the pages may be unmapped after an interrupted change."""

    def take(self, memory: MappedArena, extent: int, offset: int, *, mapping: bool) -> None:
        """Get the shard's values: map them if `mapping` and possible, otherwise copy them.

        Raises OSError if the memory is gone with its process.
        """
        source = memory.address(extent, offset)
        if not mapping or self.mapped != (memory, extent, offset):
            self.separate()
            if mapping and self.low < self.high and (source - self.start) % _PAGE == 0:
                self._map(memory, extent, offset)
        if self.mapped is None:
            memmove(self.start, source, self.end - self.start)
            return
        # Copy the parts in pages that this shard has in common with its neighbours.
        memmove(self.start, source, self.low - self.start)
        memmove(self.high, source + self.high - self.start, self.end - self.high)

    def _map(self, memory: MappedArena, extent: int, offset: int) -> None:
        try:
            memory.map_at(self.low, self.high - self.low, extent, offset + self.low - self.start)
            self.mapped = memory, extent, offset
        except (MemoryError, OSError):  # For instance too many mappings or files: copy the shard.
            self._torn = True
            self.separate()

    def separate(self) -> None:
        """Replace mapped pages by private memory with undefined values."""
        if self._torn or self.mapped is not None:
            self.mapped, self._torn = None, True  # Set the flags first: the next line may be interrupted, or fail.
            remap(self.low, self.high - self.low)
            self._torn = False

    def drop_copies(self) -> None:
        """Drop local copies of written pages, so that the owner's values are visible again."""
        if not drop_copies(self.low, self.high - self.low):
            self.separate()


class MappedShards:
    """A tensor (n × m,) of mapped shards. `tensor` has all values while `here` is true; otherwise its values are
    undefined.
    """

    _all_mappings = 0
    """Upper bound for the mappings of this process."""

    def __init__(self, numel: int, dtype: torch.dtype, size: int) -> None:
        """Reserve addresses.

        Args:
            numel: Number of elements over all ranks.
            dtype: Type of the elements.
            size: Number of ranks.

        Raises:
            OSError: If there are no free addresses.
        """
        nbytes = numel * dtype.itemsize
        pages = -(-nbytes // _PAGE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
        self._mappings = 0
        whole = torch.frombuffer(mmap.mmap(-1, pages * _PAGE, flags=flags), dtype=torch.uint8)
        self.tensor = whole[:nbytes].view(dtype)
        self.here = False
        self._start, self._pages = whole.data_ptr(), pages
        self._pieces = [_ShardPages(self._start + k * nbytes // size, nbytes // size) for k in range(size)]
        self._used: tuple[SyncPage, int] | None = None
        """The offer whose memory this tensor maps."""
        self._mappings = _mappings_of(size)
        MappedShards._all_mappings += self._mappings

    @classmethod
    def fits(cls, size: int) -> bool:
        """Return whether the system supports such mappings and allows this process another one.

        At most half of the allowed mappings are used.

        Args:
            size: Number of ranks.
        """
        return cls._all_mappings + _mappings_of(size) <= _most_mappings() // 2 and _pages_follow()

    def materialize(self) -> None:
        """Mark the values as present."""
        self.here = True

    def take(self, meeting: SyncPage, offer: int) -> None:
        """Wait until all ranks have offered, and get the values of an offer.

        Args:
            meeting: Pages of the group's ranks.
            offer: Number of the offer.

        Raises:
            PeerLost: If a peer's memory is gone; see also `SyncPage.addresses`.
        """
        places = meeting.places(offer)
        mapping = meeting.can_hold(offer)
        self._drop_copies()
        for k, place in enumerate(places):
            try:
                self._pieces[k].take(*place, mapping=mapping)
            except OSError as error:
                raise meeting.gone(k, error) from error
        if mapping:
            self._used = meeting, offer  # Set this first: an interrupt may arrive between the two lines.
            meeting.hold(offer)

    def separate(self) -> None:
        """Replace all mapped pages by private memory, which the caller then fills."""
        for piece in self._pieces:
            piece.separate()

    def free(self) -> None:
        """Release the shards, so that peers may change theirs."""
        self.here = False
        self._let_go()

    def _let_go(self) -> None:
        if self._used is not None:
            meeting, offer = self._used
            meeting.release_offer(offer)
            self._used = None

    def __del__(self) -> None:
        MappedShards._all_mappings -= self._mappings
        with suppress(Exception):  # At the end of the process, the modules used here may be gone.
            self._let_go()

    def _drop_copies(self) -> None:
        """Drop pages that were written since they were mapped."""
        mapped = [piece for piece in self._pieces if piece.mapped is not None]
        kinds = None if not mapped else _kinds_of_pages(self._start, self._pages)
        for piece in mapped:
            if kinds is not None:
                own = kinds[(piece.low - self._start) // _PAGE : (piece.high - self._start) // _PAGE]
                if not np.any((own != 0) & (own & _FROM_FILE == 0)):
                    continue
            piece.drop_copies()


def _mappings_of(size: int) -> int:
    """Return the largest number of mappings: one per shard, and one around each."""
    return 2 * size + 1


@cache
def _pages_follow() -> bool:
    """Return whether private pages of a file show later writes to the file after they were read.

    Linux does this; mmap(2) leaves it unspecified.
    """
    file = create_file(_PAGE)
    try:
        written = Mapping(file.descriptor, _PAGE)
        page = np.frombuffer(mmap.mmap(-1, _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8)
        map_over(page.ctypes.data, _PAGE, file.descriptor, 0)
        first = int(page[0])
        written.bytes[0] = first + 1
        return int(page[0]) == first + 1
    except (OSError, MemoryError):
        return False
    finally:
        file.close()


@cache
def _most_mappings() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65_530  # Linux's default.


def _kinds_of_pages(address: int, count: int) -> np.ndarray | None:
    """Return (count,) for the pages from `address` on: 0 for untouched pages, otherwise with or without `_FROM_FILE`.

    None if the system does not report it.
    """
    descriptor = _pagemap()
    if descriptor is None:
        return None
    try:
        entries = os.pread(descriptor, count * _ENTRY, address // _PAGE * _ENTRY)
    except OSError:
        return None
    return np.frombuffer(entries, dtype=np.uint64) >> np.uint64(_KIND) if len(entries) == count * _ENTRY else None


@cache
def _pagemap() -> int | None:
    try:
        return os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


# An inherited descriptor would describe the memory of the parent process.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pagemap.cache_clear)
