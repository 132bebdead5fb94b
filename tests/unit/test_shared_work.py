"""speedlab.comm.shared.work: the thread of a group, and what its callers wait for."""

from __future__ import annotations

import threading

import pytest

from speedlab.comm import PeerLost
from speedlab.comm.shared.work import Work, Worker

pytestmark = pytest.mark.timeout(30)


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_what_comes_before_the_end_is_done_and_what_comes_after_it_is_refused() -> None:
    worker, done = Worker("one that ends"), []
    gate = threading.Event()
    works = [worker.submit(gate.wait, []), worker.submit(lambda: done.append(1), [])]
    [thread] = threads("one that ends")
    worker.stop()
    gate.set()
    for work in works:
        work.wait()
    assert done == [1]
    with pytest.raises(PeerLost, match="one that ends: this rank has left"):
        worker.submit(lambda: done.append(2), [])
    thread.join(10)
    assert not thread.is_alive()
    assert worker.idle


def test_a_collective_that_failed_fails_again() -> None:
    def fail() -> None:
        raise PeerLost("rank 1 left")

    work = Work([], fail)
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 1 left"):
            work.wait()
    assert work.is_completed()
    assert not work.is_success()
