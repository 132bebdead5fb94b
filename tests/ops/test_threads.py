"""Sharing a kernel's range out to threads (`cuda_ops/parallel_for.py`)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from cuda_ops.parallel_for import _pool, share

COUNT, WORTH = 6400, 10


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_pieces_cover_the_range_once_in_order() -> None:
    pieces = share(lambda start, stop: (start, stop), COUNT, worth=WORTH)
    assert len(pieces) > 2
    assert [start for start, _ in pieces] == [0, *(stop for _, stop in pieces[:-1])]
    assert pieces[-1][1] == COUNT
    assert all(start % 16 == 0 for start, _ in pieces)
    assert share(lambda start, stop: (start, stop), WORTH, worth=WORTH) == [(0, WORTH)]


def test_an_interrupt_leaves_nobody_writing() -> None:
    """Ctrl-C on the calling thread: the other one ends its piece, takes no more, and is waited for."""
    begun, interrupted = threading.Event(), threading.Event()
    ended: list[int] = []

    def kernel(start: int, stop: int) -> None:
        if threading.current_thread() is threading.main_thread():
            assert begun.wait(10)
            interrupted.set()
            raise KeyboardInterrupt
        begun.set()
        assert interrupted.wait(10)
        ended.append(start)

    with pytest.raises(KeyboardInterrupt):
        share(kernel, COUNT, worth=WORTH)
    seen = len(ended)
    assert 1 <= seen < 31, "the other thread took all that was left"
    _pool(1).submit(int).result(10)  # Behind whatever that thread may still do.
    assert len(ended) == seen


def test_what_another_thread_raises_is_raised() -> None:
    def kernel(start: int, stop: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("on the other thread")

    def until_the_other_has_begun(start: int, stop: int) -> None:
        try:
            kernel(start, stop)
        except ValueError:
            raised.set()
            raise
        assert raised.wait(10)

    raised = threading.Event()
    with pytest.raises(ValueError, match="on the other thread"):
        share(until_the_other_has_begun, COUNT, worth=WORTH)
