"""Memory of tensors that come and go (`speedlab/offload/page_pool.py`): addresses stay, pages move between them."""

import ctypes
import gc
import sys

import pytest
import torch

from speedlab.offload import page_pool
from speedlab.offload.page_pool import PagePool

linux = pytest.mark.skipif(sys.platform != "linux", reason="pages are moved on Linux only")
CPU = torch.device("cpu")
SIZES = [1000, 3 * 2**20 + 5]
"""Elements: of a few pages, and of more than a huge one."""


@linux
@pytest.mark.parametrize("numel", SIZES)
def test_pages_move_to_the_next_that_comes(numel):
    pages = PagePool()
    one, other = (pages.room(numel, torch.float32, CPU) for _ in range(2))
    addresses = one.tensor.data_ptr(), other.tensor.data_ptr()
    one.materialize()
    one.tensor.copy_(torch.arange(numel))
    one.free()
    other.materialize()
    assert torch.equal(other.tensor, torch.arange(numel, dtype=torch.float32))  # The very pages, not fresh ones.
    assert (one.tensor.data_ptr(), other.tensor.data_ptr()) == addresses
    one.materialize()
    assert one.tensor.abs().max() == 0, "pages of its own: those it had belong to the other"
    one.tensor.fill_(7)
    assert torch.equal(other.tensor, torch.arange(numel, dtype=torch.float32))


@linux
@pytest.mark.parametrize("numel", SIZES)
def test_what_comes_back_first_has_its_own_pages(numel):
    pages = PagePool()
    one = pages.room(numel, torch.bfloat16, CPU)
    one.materialize()
    one.tensor.fill_(3)
    one.free()
    one.materialize()
    assert one.tensor.min() == 3


@linux
def test_idle_pages_do_not_grow_beside_what_is_asked_for(monkeypatch):
    dropped = []
    monkeypatch.setattr(page_pool._Moved, "drop_pages", lambda self: dropped.append(self.nbytes))
    pages = PagePool()
    small, large = (pages.room(numel, torch.float32, CPU) for numel in (1024, 4096))
    small.materialize()
    small.free()
    large.materialize()  # Of another size: idle ones go.
    assert dropped == [small.tensor.nbytes]
    large.free()
    small.materialize()  # A part of the idle ones would do, but they go as a whole.
    assert dropped == [small.tensor.nbytes, large.tensor.nbytes]


@linux
def test_trimmed_pages_are_gone_and_come_as_zeros():
    pages = PagePool()
    one = pages.room(5000, torch.float32, CPU)
    one.materialize()
    one.tensor.fill_(1)
    one.free()
    pages.trim()
    one.materialize()
    assert one.tensor.abs().max() == 0
    pages.trim()
    one.materialize()  # It is here: nothing happens.
    one.tensor.fill_(2)
    pages.trim()
    assert one.tensor.min() == 2


@linux
@pytest.mark.parametrize("numel", SIZES)
def test_a_system_that_cannot_move_pages_gets_new_ones(monkeypatch, numel):
    libc = page_pool._libc()
    calls = []

    class Refuses:
        mmap, madvise = libc.mmap, libc.madvise

        def mremap(self, old, size, new_size, flags, new):
            """As many versions of Linux do: they first unmap what is at the new address."""
            calls.append(size)
            libc.munmap(new, size)
            return 2**64 - 1

    pages = PagePool()
    one, other = (pages.room(numel, torch.float32, CPU) for _ in range(2))
    one.materialize()
    one.tensor.fill_(1)
    one.free()
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    monkeypatch.setattr(page_pool, "_libc", Refuses)
    other.materialize()
    assert other.tensor.abs().max() == 0
    other.tensor.fill_(5)
    one.materialize()
    assert one.tensor.abs().max() == 0
    assert other.tensor.min() == 5
    other.free()
    one.free()
    other.materialize()
    assert len(calls) == 1, "what the system has refused is not asked for again"


@linux
def test_each_move_is_of_one_stretch(monkeypatch):
    """Behind huge pages lie small ones: to the system another stretch, and most versions move only one at a time."""
    libc, moved = page_pool._libc(), []

    class Watched:
        mmap, madvise = libc.mmap, libc.madvise

        def mremap(self, old, size, *rest):
            moved.append(size)
            return libc.mremap(old, size, *rest)

    monkeypatch.setattr(page_pool, "_libc", Watched)
    pages = PagePool()
    one, other = (pages.room(3 * 2**20 // 4, torch.float32, CPU) for _ in range(2))
    one.materialize()
    one.tensor.fill_(2)
    one.free()
    other.materialize()
    assert moved == [2 * 2**20, 2**20]
    assert other.tensor.min() == 2


@linux
def test_who_is_gone_leaves_no_pages():
    pages = PagePool()
    one, other = (pages.room(4000, torch.float32, CPU) for _ in range(2))
    one.materialize()
    one.free()
    del one
    gc.collect()
    other.materialize()
    other.tensor.fill_(1)
    assert other.tensor.sum() == 4000


def test_other_devices_resize_their_storage(monkeypatch):
    monkeypatch.setattr(page_pool.sys, "platform", "darwin")
    one = PagePool().room(100, torch.float32, CPU)
    assert not one.here
    assert one.tensor.untyped_storage().nbytes() == 0
    one.materialize()
    one.tensor.fill_(1)
    assert one.here
    assert one.tensor.sum() == 100
    one.free()
    assert one.tensor.untyped_storage().nbytes() == 0
