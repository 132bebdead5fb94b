"""The pool itself: a tool that hid a hang or a failure would make every other test worthless."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from ranks.pool import Pool, RanksFailed, RanksHung


def sum_of_ranks() -> tuple[int, float]:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(dist.get_rank() + 1))
    dist.all_reduce(total)
    return os.getpid(), total.item()


def fail_on(bad: int) -> None:
    """One rank raises; the others wait for it in a collective."""
    import torch.distributed as dist

    if dist.get_rank() == bad:
        raise KeyError("the reason")
    dist.barrier()


def hang_on(bad: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == bad:
        threading.Event().wait()


def die_on(bad: int) -> None:
    import torch.distributed as dist

    if dist.get_rank() == bad:
        os._exit(7)
    dist.barrier()


def settings() -> tuple[str, str, int]:
    import torch

    return os.environ["OMP_NUM_THREADS"], os.environ["OMP_WAIT_POLICY"], torch.get_num_threads()


def test_results_come_by_rank_from_the_same_processes(ranks: Pool) -> None:
    results = ranks.run(sum_of_ranks)
    assert [pid for pid, _ in results] == ranks.pids
    assert [total for _, total in results] == [sum(range(1, ranks.size + 1))] * ranks.size
    assert ranks.run(settings) == [("1", "passive", 1)] * ranks.size


@pytest.fixture(params=[2, 4], ids=lambda size: f"dp{size}")
def fresh(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """A pool of the test's own: what others left in a shared one (a device mesh, say) keeps connections open."""
    pool = Pool(request.param)
    yield pool
    pool.close()


def test_failure_is_raised_with_its_traceback_and_the_processes_go_on(fresh: Pool) -> None:
    fresh.run(sum_of_ranks)
    before, bad = fresh.pids, fresh.size - 1
    with pytest.raises(RanksFailed) as caught:
        fresh.run(fail_on, bad)
    assert caught.value.by_rank[bad].kind == "KeyError"
    assert 'raise KeyError("the reason")' in str(caught.value)
    assert fresh.pids == before
    assert [total for _, total in fresh.run(sum_of_ranks)] == [sum(range(1, fresh.size + 1))] * fresh.size


def test_hang_is_named_shows_stacks_and_the_pool_starts_anew(two: Pool) -> None:
    two.run(sum_of_ranks)
    before = two.pids
    with pytest.raises(RanksHung, match=r"hang_on did not return in 1 s on rank \[1\][\s\S]*in hang_on"):
        two.run(hang_on, 1, timeout=1.0)
    assert [total for _, total in two.run(sum_of_ranks)] == [3.0, 3.0]
    assert not set(before) & set(two.pids)


def test_death_is_named_and_the_pool_starts_anew(two: Pool) -> None:
    with pytest.raises((RanksHung, RanksFailed)) as caught:
        two.run(die_on, 1)
    assert "die_on" in str(caught.value)
    assert [total for _, total in two.run(sum_of_ranks)] == [3.0, 3.0]
