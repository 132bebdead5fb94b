"""A tensor in equal pieces that lie with the ranks of one host: every rank maps the pieces of all where they are, so
that it has the whole without copying it.

1. A rank's piece begins at the same place of a page in its own memory as in the whole. So all pages that are of one
   rank alone are mapped; of those in which two pieces meet each rank has its own, and copies those few bytes.
2. Pages are mapped privately: who writes into the whole writes into a copy of the page, which nobody else sees. The
   system tells which pages are such copies (pagemap); they are dropped when the whole comes again, so that it has the
   owners' values each time.
3. Values are those that the pieces' owners have there. None of them writes while a peer has the whole
   (`SyncPage.hold`).
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

from speedlab.comm.shared.memfd import NORESERVE, Mapping, create_file, drop_copies, map_anew, map_over
from speedlab.comm.shared.sync_page import SyncPage

_PAGE = mmap.PAGESIZE
_ENTRY = 8
"""Bytes that pagemap has for a page."""

_KIND, _FROM_FILE = 61, 1
"""Of such an entry: bits 63 to 61 are "present", "swapped" and "of a file, or shared"."""


class MappedArena(Protocol):
    """An arena, of this process or of another one."""

    def address(self, extent: int, offset: int) -> int: ...
    def map_at(self, address: int, nbytes: int, extent: int, offset: int) -> None: ...


class _ShardPages:
    """Where the piece of one rank stands in the whole: [start, end), of which [low, high) are pages of it alone."""

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.end = start, start + nbytes
        self.low = min(-(-self.start // _PAGE) * _PAGE, self.end)
        self.high = max(self.end // _PAGE * _PAGE, self.low)
        self.mapped: tuple[MappedArena, int, int] | None = None
        """What is mapped there: (memory, extent, offset)."""
        self._torn = False
        """Whether nothing may be mapped there at all."""

    def take(self, memory: MappedArena, extent: int, offset: int, *, mapping: bool) -> None:
        """Have the values that stand there, by `mapping` where that can be done. Raises OSError when they are gone with
        their process."""
        source = memory.address(extent, offset)
        if not mapping or self.mapped != (memory, extent, offset):
            self.separate()
            if mapping and self.low < self.high and (source - self.start) % _PAGE == 0:
                self._map(memory, extent, offset)
        if self.mapped is None:
            memmove(self.start, source, self.end - self.start)
            return
        memmove(self.start, source, self.low - self.start)
        memmove(self.high, source + self.high - self.start, self.end - self.high)

    def _map(self, memory: MappedArena, extent: int, offset: int) -> None:
        try:
            memory.map_at(self.low, self.high - self.low, extent, offset + self.low - self.start)
            self.mapped = memory, extent, offset
        except (MemoryError, OSError):  # Too many mappings or files, say: it is copied.
            self._torn = True
            self.separate()

    def separate(self) -> None:
        """Memory of its own, with any values."""
        if self._torn or self.mapped is not None:
            self.mapped, self._torn = None, True  # First: what follows may be cut off, or fail.
            map_anew(self.low, self.high - self.low)
            self._torn = False

    def drop_copies(self) -> None:
        """Pages that were written here show their owner's values again."""
        if not drop_copies(self.low, self.high - self.low):
            self.separate()


class MappedShards:
    """`tensor` (n × m,), with the values of all pieces while it is `here`. Whoever reads it at other times finds the
    present values of some, or others."""

    _all_mappings = 0
    """That those of this process may take."""

    def __init__(self, numel: int, dtype: torch.dtype, size: int) -> None:
        """Raises OSError where there are no addresses for it."""
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
        """The offer whose memory is in use here."""
        self._mappings = _mappings_of(size)
        MappedShards._all_mappings += self._mappings

    @classmethod
    def fits(cls, size: int) -> bool:
        """Whether the system maps as this needs, and allows this process the mappings of one more, of so many ranks,
        beside as many for others."""
        return cls._all_mappings + _mappings_of(size) <= _most_mappings() // 2 and _pages_follow()

    def materialize(self) -> None:
        self.here = True

    def take(self, meeting: SyncPage, offer: int) -> None:
        """Have the values of an offer of all ranks; waits until all are offered. Raises as `SyncPage.addresses`."""
        places = meeting.places(offer)
        mapping = meeting.can_hold(offer)
        self._drop_copies()
        for k, place in enumerate(places):
            try:
                self._pieces[k].take(*place, mapping=mapping)
            except OSError as error:
                raise meeting.gone(k, error) from error
        if mapping:
            self._used = meeting, offer  # First: Ctrl-C may come between the two.
            meeting.hold(offer)

    def separate(self) -> None:
        """Nothing is mapped any more: whoever fills it writes into memory of this rank."""
        for piece in self._pieces:
            piece.separate()

    def free(self) -> None:
        self.here = False
        self._let_go()

    def _let_go(self) -> None:
        if self._used is not None:
            meeting, offer = self._used
            meeting.release_offer(offer)
            self._used = None

    def __del__(self) -> None:
        MappedShards._all_mappings -= self._mappings
        with suppress(Exception):  # At the end of the process, where nothing is left of what this needs.
            self._let_go()

    def _drop_copies(self) -> None:
        """Of the pages that were written here since they were mapped."""
        mapped = [piece for piece in self._pieces if piece.mapped is not None]
        kinds = None if not mapped else _kinds_of_pages(self._start, self._pages)
        for piece in mapped:
            if kinds is not None:
                own = kinds[(piece.low - self._start) // _PAGE : (piece.high - self._start) // _PAGE]
                if not np.any((own != 0) & (own & _FROM_FILE == 0)):
                    continue
            piece.drop_copies()


def _mappings_of(size: int) -> int:
    """A piece of each rank, and what stands around each."""
    return 2 * size + 1


@cache
def _pages_follow() -> bool:
    """Whether private pages of a file that were read show what is written there later, as Linux's do: what mmap(2)
    promises leaves that open."""
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
        return 65_530  # Linux's own choice.


def _kinds_of_pages(address: int, count: int) -> np.ndarray | None:
    """(count,) of the pages from `address` on: 0 where nothing is there yet, else `_FROM_FILE` or not. None where the
    system does not tell."""
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


# What a forked child inherits tells of its parent's memory.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pagemap.cache_clear)
