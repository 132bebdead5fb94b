"""Ranks that do not make the same call on the shared-memory backend: every rank raises, says what each asked for and
from which line, and the group is closed until the ranks meet again."""

from __future__ import annotations

import contextlib
import datetime
import functools
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from ranks.conftest import PoolOf
from ranks.loops import Case, Trajectory, engine_for, engine_step
from ranks.pool import Pool, _join
from ranks.test_shared_backend import gather_whole, new_group, scatter_sum
from speedlab.comm import CommStats, Group, PeerLost, rank_activity
from speedlab.comm.timeouts import give_timeout

Act = Callable[[Any, int], Any]
"""What one rank calls: (group, number of ranks)."""

Said = tuple[str, str, str, float]
"""What a rank raised, its text, that of the next call in the group, and the seconds of both."""

FLOAT, INT = torch.float32, torch.int32


def ones(*shape: int, dtype: torch.dtype = FLOAT) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def reduce_to(group: Any, root: int, op: Any = dist.ReduceOp.SUM) -> None:
    dist.reduce(ones(4), group=group, group_dst=root, op=op)


def gather_to(group: Any, n: int, root: int, dtype: torch.dtype = FLOAT) -> None:
    outs = [ones(4, dtype=dtype) for _ in range(n)] if dist.get_rank(group) == root else None
    dist.gather(ones(4, dtype=dtype), outs, group=group, group_dst=root)


def scatter_from(group: Any, n: int, root: int) -> None:
    parts = [ones(4) for _ in range(n)] if dist.get_rank(group) == root else None
    dist.scatter(ones(4), parts, group=group, group_src=root)


def reduce_coalesced(group: Any, *sizes: int) -> None:
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        dist.all_reduce_coalesced([ones(size) for size in sizes], group=group)


def wait(work: Any) -> None:
    assert work is not None
    work.wait()


CASES: dict[str, tuple[Act, Act, list[str]]] = {
    "operation": (
        lambda g, n: dist.all_reduce(ones(4), group=g),
        lambda g, n: dist.broadcast(ones(4), group=g, group_src=0),
        ["all_reduce (sum) of 4 float32", "broadcast of 4 float32, root rank 0"],
    ),
    "dtype of all_reduce": (
        lambda g, n: dist.all_reduce(ones(4), group=g),
        lambda g, n: dist.all_reduce(ones(4, dtype=INT), group=g),
        ["of 4 float32", "of 4 int32"],
    ),
    "a dtype that goes to gloo": (
        lambda g, n: dist.all_reduce(ones(4), group=g),
        lambda g, n: dist.all_reduce(ones(4, dtype=torch.bool), op=dist.ReduceOp.SUM, group=g),
        ["of 4 float32", "of 4 bool"],
    ),
    "elements of all_reduce": (
        lambda g, n: dist.all_reduce(ones(4), group=g),
        lambda g, n: dist.all_reduce(ones(5), group=g),
        ["of 4 float32", "of 5 float32"],
    ),
    "elements of a large all_reduce": (
        lambda g, n: dist.all_reduce(ones(2_000_000), group=g),
        lambda g, n: dist.all_reduce(ones(4), group=g),
        ["of 2,000,000 float32", "of 4 float32"],
    ),
    "no elements": (
        lambda g, n: gather_whole(ones(0), ones(0), group=g),
        lambda g, n: gather_whole(ones(4 * n), ones(4), group=g),
        ["all_gather of 0 float32", "all_gather of 4 float32"],
    ),
    "reduction": (
        lambda g, n: dist.all_reduce(ones(4), group=g),
        lambda g, n: dist.all_reduce(ones(4), op=dist.ReduceOp.MAX, group=g),
        ["all_reduce (sum) of 4", "all_reduce (max) of 4"],
    ),
    "root of broadcast": (
        lambda g, n: dist.broadcast(ones(4), group=g, group_src=0),
        lambda g, n: dist.broadcast(ones(4), group=g, group_src=1),
        ["root rank 0", "root rank 1"],
    ),
    "elements of broadcast": (
        lambda g, n: dist.broadcast(ones(4), group=g, group_src=0),
        lambda g, n: dist.broadcast(ones(3), group=g, group_src=0),
        ["of 4 float32", "of 3 float32"],
    ),
    "dtype of all_gather": (
        lambda g, n: gather_whole(ones(4 * n), ones(4), group=g),
        lambda g, n: gather_whole(ones(4 * n, dtype=INT), ones(4, dtype=INT), group=g),
        ["all_gather of 4 float32", "all_gather of 4 int32"],
    ),
    "elements of a list of all_gather": (
        lambda g, n: dist.all_gather([ones(4) for _ in range(n)], ones(4), group=g),
        lambda g, n: dist.all_gather([ones(2) for _ in range(n)], ones(2), group=g),
        ["all_gather of 4 float32", "all_gather of 2 float32"],
    ),
    "elements of reduce_scatter": (
        lambda g, n: scatter_sum(ones(4), ones(4 * n), group=g),
        lambda g, n: scatter_sum(ones(2), ones(2 * n), group=g),
        ["reduce_scatter (sum) of 4 float32", "reduce_scatter (sum) of 2 float32"],
    ),
    "reduction of reduce_scatter": (
        lambda g, n: scatter_sum(ones(4), ones(4 * n), group=g),
        lambda g, n: scatter_sum(ones(4), ones(4 * n), op=dist.ReduceOp.AVG, group=g),
        ["reduce_scatter (sum)", "reduce_scatter (avg)"],
    ),
    "dtype of all_to_all": (
        lambda g, n: dist.all_to_all_single(ones(2 * n), ones(2 * n), group=g),
        lambda g, n: dist.all_to_all_single(ones(2 * n, dtype=INT), ones(2 * n, dtype=INT), group=g),
        ["all_to_all of float32", "all_to_all of int32"],
    ),
    "parts of all_to_all": (
        lambda g, n: dist.all_to_all_single(ones(2 * n), ones(2 * n), group=g),
        lambda g, n: dist.all_to_all_single(ones(3 * n), ones(3 * n), group=g),
        ["all_to_all: rank ", " elements to rank ", "which expects"],
    ),
    "root of reduce": (lambda g, n: reduce_to(g, 0), lambda g, n: reduce_to(g, 1), ["root rank 0", "root rank 1"]),
    "reduction of reduce": (
        lambda g, n: reduce_to(g, 0),
        lambda g, n: reduce_to(g, 0, dist.ReduceOp.MIN),
        ["reduce (sum)", "reduce (min)"],
    ),
    "root of gather": (lambda g, n: gather_to(g, n, 0), lambda g, n: gather_to(g, n, 1), ["root rank 0", "rank 1"]),
    "dtype of gather": (
        lambda g, n: gather_to(g, n, 0),
        lambda g, n: gather_to(g, n, 0, INT),
        ["gather of 4 float32", "gather of 4 int32"],
    ),
    "root of scatter": (lambda g, n: scatter_from(g, n, 0), lambda g, n: scatter_from(g, n, 1), ["root rank 1"]),
    "all_reduce and reduce": (
        lambda g, n: dist.all_reduce(ones(4), group=g),
        lambda g, n: reduce_to(g, 0),
        ["all_reduce (sum)", "reduce (sum) of 4 float32, root rank 0"],
    ),
    "barrier and broadcast": (
        lambda g, n: dist.barrier(g),
        lambda g, n: dist.broadcast(ones(1), group=g, group_src=0),
        ["barrier", "broadcast of 1 float32"],
    ),
    "a list of tensors": (
        lambda g, n: reduce_coalesced(g, 4, 2),
        lambda g, n: reduce_coalesced(g, 2, 4),
        ["in several tensors"],
    ),
    "asynchronous calls": (
        lambda g, n: wait(dist.all_reduce(ones(4), group=g, async_op=True)),
        lambda g, n: wait(dist.all_reduce(ones(4, dtype=INT), group=g, async_op=True)),
        ["of 4 float32", "of 4 int32"],
    ),
    "an asynchronous call and one that waits": (
        lambda g, n: wait(dist.all_reduce(ones(4), group=g, async_op=True)),
        lambda g, n: dist.barrier(g),
        ["all_reduce (sum) of 4 float32", "barrier"],
    ),
    "a rank that skipped a collective": (
        lambda g, n: (dist.barrier(g), dist.all_reduce(ones(4), group=g)),
        lambda g, n: dist.all_reduce(ones(4), group=g),
        ["barrier, call 2", "all_reduce (sum) of 4 float32, call 2"],
    ),
    "refused by the root of a gather": (
        lambda g, n: dist.gather(ones(4), group=g, group_dst=n - 1),
        lambda g, n: dist.gather(ones(4), [ones(5) for _ in range(n)], group=g, group_dst=n - 1),
        ["gather of 4 float32", "arguments that were refused, call 2 (gather: tensor 0 of the list"],
    ),
    "refused by one rank": (
        lambda g, n: dist.all_gather([ones(4) for _ in range(n)], ones(4), group=g),
        lambda g, n: dist.all_gather([ones(5) for _ in range(n)], ones(4), group=g),
        [
            "all_gather of 4 float32",
            "all_gather with arguments that were refused, call 2 (all_gather: tensor 0 of the list",
        ],
    ),
}


def mismatched(names: Sequence[str]) -> dict[str, Said]:
    """For each case; the last rank calls the other one."""
    n, last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    said = {}
    for name in names:
        with new_group(range(n), timeout=datetime.timedelta(seconds=30)) as group:
            dist.all_reduce(ones(1), group=group)
            began = time.monotonic()
            act = CASES[name][1] if last else CASES[name][0]
            kind, text = raised(lambda: act(group, n))  # noqa: B023  # called at once
            _, again = raised(lambda: dist.all_reduce(ones(1), group=group))  # as above
            seconds = time.monotonic() - began
            dist.barrier()
        said[name] = kind, text, again, seconds
    with new_group(range(n)) as group:
        total = ones(3)
        dist.all_reduce(total, group=group)
        assert total.tolist() == [n] * 3, "ranks that meet again have a group that works"
    return said


def raised(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except (PeerLost, ValueError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def check(by_rank: list[dict[str, Said]]) -> None:
    n = len(by_rank)
    for rank, said in enumerate(by_rank):
        for name, (kind, text, again, seconds) in said.items():
            odd_one = name.startswith("refused") and rank == n - 1
            assert kind == ("ValueError" if odd_one else "CollectiveMismatch"), (name, rank, kind, text)
            full = again if odd_one else text
            for part in CASES[name][2]:
                assert part in full, (name, rank, part, full)
            for other in ("rank 0" if n == 2 else f"ranks 0-{n - 2}", f"rank {n - 1}"):
                assert f"\n  {other}: " in full, (name, rank, full)
            assert full.count(f"{__file__}:") == 2, (name, rank, full)
            assert "leave the world and join it again" in full, (name, rank)
            assert again.startswith("This group of ranks is closed since an earlier error. "), (name, rank, again)
            assert seconds < 4, (name, rank, seconds)


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_every_rank_names_what_each_asked_for(ranks: Pool) -> None:
    check(ranks.run(mismatched, list(CASES), timeout=60))


# ---- hosts -----------------------------------------------------------------------------------------------------------

SPANNING = [
    "operation",
    "dtype of all_reduce",
    "root of broadcast",
    "no elements",
    "root of gather",
    "parts of all_to_all",
    "asynchronous calls",
]


@pytest.mark.parametrize(
    ("hosts", "odd"),
    [
        ("aabb", 3),
        ("aaab", 3),
        pytest.param("aabb", 2, marks=pytest.mark.nightly),
        pytest.param("abab", 0, marks=pytest.mark.nightly),
    ],
)
def test_groups_that_span_hosts(pool_of: PoolOf, hosts: str, odd: int) -> None:
    """One rank, that speaks for its host or does not, calls something else: all ranks of all hosts raise."""
    by_rank = pool_of(4, "shared", hosts).run(mismatched_over_hosts, SPANNING, odd, timeout=60)
    for rank, said in enumerate(by_rank):
        for name, (kind, text, again, seconds) in said.items():
            assert kind == "CollectiveMismatch", (name, rank, kind, text)
            assert again == "CollectiveMismatch", (name, rank, again)
            if hosts[rank] == hosts[odd] or rank == hosts.index(hosts[rank]):
                for part in CASES[name][2]:
                    assert part in text, (name, rank, part, text)
            assert seconds < 8, (name, rank, seconds)


def mismatched_over_hosts(names: Sequence[str], odd: int) -> dict[str, tuple[str, str, str, float]]:
    n, said = dist.get_world_size(), {}
    for name in names:
        with new_group(range(n), timeout=datetime.timedelta(seconds=30)) as group:
            dist.all_reduce(ones(1), group=group)
            act = CASES[name][1] if dist.get_rank() == odd else CASES[name][0]
            began = time.monotonic()
            kind, text = raised(lambda: act(group, n))  # noqa: B023  # called at once
            again, _ = raised(lambda: dist.all_reduce(ones(1), group=group))  # as above
            said[name] = kind, text, again, time.monotonic() - began
            dist.barrier()
    return said


# ---- messages --------------------------------------------------------------------------------------------------------


def unfit_message(elements: int, dtype: torch.dtype) -> tuple[str, str, str]:
    n = dist.get_world_size()
    with new_group(range(n)) as group:
        kind = text = ""
        if dist.get_rank() == 0:
            dist.send(ones(4), group=group, group_dst=1)
        elif dist.get_rank() == 1:
            kind, text = raised(lambda: dist.recv(ones(elements, dtype=dtype), group=group, group_src=0))
        again, _ = raised(lambda: dist.barrier(group))
        dist.barrier()
    return kind, text, again


@pytest.mark.parametrize(("elements", "dtype"), [(5, FLOAT), (4, INT), (8, torch.bfloat16)])
def test_message_of_another_size_or_dtype(pool_of: PoolOf, elements: int, dtype: torch.dtype) -> None:
    said = pool_of(4).run(unfit_message, elements, dtype, timeout=30)
    kind, text, _ = said[1]
    name = str(dtype).removeprefix("torch.")
    assert kind == "CollectiveMismatch"
    assert text.startswith(f"Rank 1 expected {elements} {name} from rank 0 with tag 0, which sent 4 float32."), text
    assert f"\n  rank 1: recv of {elements} {name} from rank 0, tag 0, at {__file__}:" in text
    assert [again for *_, again in said] == ["CollectiveMismatch"] * 4, "the ranks that wait, and this one, hear of it"


def poll_for_a_message() -> str:
    """Rank 1 looks for a message, without waiting, while rank 2 finds that a message of rank 0 does not fit."""
    kind = ""
    with new_group([0, 1, 2]) as group:
        if dist.get_rank() == 0:
            dist.send(ones(4), group=group, group_dst=2)
            kind, _ = raised(lambda: dist.recv(ones(1), group=group, group_src=2))
        elif dist.get_rank() == 1:
            work = dist.irecv(ones(4), group=group, group_src=0)
            assert work is not None
            while not work.is_completed():
                time.sleep(0.001)
            kind, _ = raised(work.wait)
        elif dist.get_rank() == 2:
            kind, _ = raised(lambda: dist.recv(ones(3), group=group, group_src=0))
        dist.barrier()
    return kind


def test_a_rank_that_looks_for_a_message_hears_of_a_mismatch(pool_of: PoolOf) -> None:
    assert pool_of(4).run(poll_for_a_message, timeout=30)[:3] == ["CollectiveMismatch"] * 3


# ---- interrupts ------------------------------------------------------------------------------------------------------


def go_on_after_an_interrupt() -> tuple[str, str]:
    """Rank 0 gives up a call, as after Ctrl-C, and makes the next one, which is another one than that of rank 1."""
    with new_group([0, 1], timeout=datetime.timedelta(seconds=20)) as group:
        if dist.get_rank() == 0:
            with interrupt_after(0.2), contextlib.suppress(KeyboardInterrupt):
                dist.all_reduce(ones(4), group=group)
        dist.barrier()
        if dist.get_rank() == 0:
            kind, text = raised(lambda: dist.broadcast(ones(4), group=group, group_src=0))
        else:
            kind, text = raised(lambda: (dist.all_reduce(ones(4), group=group), dist.barrier(group)))
        dist.barrier()
    return kind, text


@contextlib.contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()
        signal.signal(signal.SIGINT, before)


def test_a_rank_that_goes_on_after_an_interrupt(two: Pool) -> None:
    for kind, text in two.run(go_on_after_an_interrupt, timeout=40):
        assert kind == "CollectiveMismatch", text
        assert "rank 0: broadcast of 4 float32, root rank 0" in text


# ---- flats that peers read in place ----------------------------------------------------------------------------------


def mismatched_transfers(case: str) -> tuple[str, str, str]:
    """The last rank begins another transfer of flats than the others; then one that all begin."""
    n, last = dist.get_world_size(), dist.get_rank() == dist.get_world_size() - 1
    group = Group(range(n), CommStats(), torch.device("cpu"), channel=f"mismatch {case}")
    numel = 8 * n
    flat, own = group.empty(numel, FLOAT), torch.zeros(8)
    reduce_scatter = lambda: group.reduce_scatter(flat, own).wait()  # noqa: E731  # one expression
    other: dict[str, Callable[[], Any]] = {
        "operation": lambda: group.all_reduce(flat).wait(),
        "gather": lambda: group.all_gather(flat, own).wait(),
        "dtype": lambda: group.reduce_scatter(flat.to(torch.int32), own.to(torch.int32)).wait(),
        "elements": lambda: group.reduce_scatter(torch.ones(4 * n), own[:4]).wait(),
    }
    kind, text = raised(other[case] if last else reduce_scatter)
    again, _ = raised(reduce_scatter)
    dist.barrier()
    return kind, text, again


@pytest.mark.parametrize("case", ["operation", "gather", "dtype", "elements"])
def test_flats_read_in_place(pool_of: PoolOf, case: str) -> None:
    expected = {
        "operation": "all_reduce of 16 float32",
        "gather": "all_gather of 8 float32",
        "dtype": "reduce_scatter of 16 int32",
        "elements": "reduce_scatter of 8 float32",
    }[case]
    pool = pool_of(2)
    for kind, text, again in pool.run(mismatched_transfers, case, timeout=30):
        assert (kind, again) == ("CollectiveMismatch", "CollectiveMismatch"), text
        assert f"\n  rank 0: reduce_scatter of 16 float32 in place, transfer 1, at {__file__}:" in text, text
        assert f"\n  rank 1: {expected} in place, transfer 1, at {__file__}:" in text, text
    pool.new_group()


# ---- waits of different kinds ----------------------------------------------------------------------------------------


def wait_for_each_other() -> tuple[str, str, str]:
    """Rank 0 waits in a collective, rank 1 for a message of rank 0: the limit of time ends that."""
    with new_group([0, 1], timeout=datetime.timedelta(seconds=2)) as group:
        with rank_activity.doing("save_checkpoint" if dist.get_rank() == 0 else "forward", 3):
            if dist.get_rank() == 0:
                kind, text = raised(lambda: dist.barrier(group))
            else:
                kind, text = raised(lambda: dist.recv(ones(4), group=group, group_src=0))
        again, _ = raised(lambda: dist.barrier(group))
        dist.barrier()
    return kind, text, again


def test_ranks_that_wait_for_each_other_in_different_calls(two: Pool) -> None:
    for kind, text, again in two.run(wait_for_each_other, timeout=30):
        assert (kind, again) == ("CollectiveMismatch", "CollectiveMismatch"), text
        assert "did not come within 2 s" in text
        assert f"\n  rank 0: barrier, call 1, at {__file__}:" in text, text
        assert f"\n  rank 1: recv of 4 float32 from rank 0, tag 0, at {__file__}:" in text, text
        assert "; it is in step 3 (save_checkpoint)" in text
        assert "; it is in step 3 (forward)" in text


def all_refuse_the_same() -> tuple[list[str], float]:
    """All ranks make the same mistake: each is refused, and the group goes on."""
    said = [raised(lambda: gather_whole(ones(3), ones(2)))[1] for _ in range(3)]
    total = ones(1)
    dist.all_reduce(total)
    return said, float(total)


def test_arguments_that_all_ranks_refuse(two: Pool) -> None:
    for said, total in two.run(all_refuse_the_same):
        assert all("is no 2 equal slices of contiguous memory" in text for text in said), said
        assert total == 2.0


# ---- random sequences ------------------------------------------------------------------------------------------------

DTYPES = [FLOAT, INT, torch.bool, torch.bfloat16]
KINDS = ["all_reduce", "max", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "gather", "reduce", "barrier"]
OTHERS = ["kind", "dtype", "numel", "root", "skip", "twice"]


class Step(NamedTuple):
    """One collective of a sequence."""

    kind: str
    dtype: torch.dtype
    numel: int
    root: int
    later: bool
    """Whether it is asynchronous."""

    @property
    def compared(self) -> tuple[Any, ...]:
        """What must be the same on all ranks."""
        kind = "max" if self.kind == "all_reduce" and self.dtype is torch.bool else self.kind
        if kind == "barrier" or (kind in ("reduce", "reduce_scatter") and self.dtype is torch.bool):
            return ("barrier",)
        return kind, self.dtype, self.numel, self.root if kind in ("broadcast", "gather", "reduce") else None


def steps_of(seed: int, n: int, odd: bool) -> list[Step]:
    """The same on all ranks; an `odd` one has another step somewhere, or one more or less."""
    drawn = random.Random(seed)
    steps = [
        Step(
            drawn.choice(KINDS),
            drawn.choice(DTYPES),
            drawn.choice([0, 1, 5, 300_000]),
            drawn.randrange(n),
            drawn.random() < 0.3,
        )
        for _ in range(6)
    ]
    place, other = drawn.randrange(6), drawn.choice(OTHERS)
    if odd:
        step = steps[place]
        changed = {
            "kind": step._replace(kind=KINDS[KINDS.index(step.kind) - 1]),
            "dtype": step._replace(dtype=DTYPES[DTYPES.index(step.dtype) - 1]),
            "numel": step._replace(numel=step.numel + 1),
            "root": step._replace(root=(step.root + 1) % n),
        }
        steps[place : place + 1] = {"skip": [], "twice": [step, step]}.get(other, [changed.get(other, step)])
    return steps


def take(step: Step, group: Any, rank: int, n: int) -> None:
    """Carry out one step and compare what it gives. Every rank contributes its number + 1, or True."""
    kind, dtype, numel, root, later = step
    mine = torch.full((numel,), rank + 1).to(dtype)
    each = [torch.full((numel,), k + 1).to(dtype) for k in range(n)]
    rows, outs = mine.repeat(n), [torch.zeros_like(mine) for _ in range(n)]
    adds = dist.ReduceOp.MAX if dtype is torch.bool or kind == "max" else dist.ReduceOp.SUM
    total = functools.reduce(torch.maximum if adds == dist.ReduceOp.MAX else torch.add, each)
    work: Any = None
    if kind in ("all_reduce", "max"):
        work = dist.all_reduce(mine, adds, group=group, async_op=later)
        found, right = [mine], [total]
    elif kind == "broadcast":
        work = dist.broadcast(mine, group=group, group_src=root, async_op=later)
        found, right = [mine], [each[root]]
    elif kind == "all_gather":
        work = dist.all_gather(outs, mine, group=group, async_op=later)
        found, right = outs, each
    elif kind == "reduce_scatter" and dtype is not torch.bool:
        out = torch.zeros_like(mine)
        work = scatter_sum(out, rows, group=group, async_op=later)
        found, right = [out], [total]
    elif kind == "all_to_all":
        work = dist.all_to_all(outs, list(rows.view(n, -1)), group=group, async_op=later)
        found, right = outs, each
    elif kind == "gather":
        work = dist.gather(mine, outs if rank == root else None, group=group, group_dst=root, async_op=later)
        found, right = (outs, each) if rank == root else ([], [])
    elif kind == "reduce" and dtype is not torch.bool:
        work = dist.reduce(mine, group=group, group_dst=root, async_op=later)
        found, right = ([mine], [total]) if rank == root else ([], [])
    else:
        work = dist.barrier(group, async_op=later)
        found, right = [], []
    if work is not None:
        work.wait()
    for ours, expected in zip(found, right, strict=True):
        assert torch.equal(ours, expected), (step, ours[:3], expected[:3])


def random_sequences(seeds: Sequence[int]) -> dict[int, tuple[str, float]]:
    """What each sequence ended with on this rank, '' for its end, and its seconds."""
    n, rank, ended = dist.get_world_size(), dist.get_rank(), {}
    for seed in seeds:
        with new_group(range(n), timeout=datetime.timedelta(seconds=40)) as group:
            began, kind = time.monotonic(), ""
            try:
                for step in steps_of(seed, n, odd=rank == seed % n):
                    take(step, group, rank, n)
            except PeerLost as error:
                kind = type(error).__name__
            group.leave()
            ended[seed] = kind, time.monotonic() - began
            dist.barrier()
    return ended


def sequences_of_one_odd_rank(pool: Pool, seeds: Sequence[int], timeout: float) -> None:
    """No rank gets a wrong value, nobody waits for the limit of time, and a mismatch is found unless only the number
    of calls differs, whose end is a rank that left."""
    by_rank = pool.run(random_sequences, seeds, timeout=timeout)
    for seed in seeds:
        kinds = [said[seed][0] for said in by_rank]
        assert max(said[seed][1] for said in by_rank) < 30, (seed, by_rank)
        usual, odd = ([step.compared for step in steps_of(seed, pool.size, odd=is_odd)] for is_odd in (False, True))
        same = usual == odd
        assert not any(kinds) if same else any(kinds), (seed, kinds)


@pytest.mark.parametrize("ranks", [3], indirect=True)
def test_random_sequences(ranks: Pool) -> None:
    sequences_of_one_odd_rank(ranks, range(6), 60)


@pytest.mark.nightly
@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_many_random_sequences(ranks: Pool) -> None:
    sequences_of_one_odd_rank(ranks, range(100, 300), 280)


# ---- engines ---------------------------------------------------------------------------------------------------------


def train_on_after_a_mismatch(stage: int, folder: Path) -> tuple[str, list[float]]:
    """In step 1 rank 0 gathers the state and rank 1 makes the step, until a limit of time ends it; then the ranks meet
    again, as a run does."""
    case = Case(stage=stage, steps=3)
    world: Any = dist.group.WORLD
    world.limit(2)
    give_timeout(2)
    with contextlib.ExitStack() as stack:
        stack.callback(give_timeout, None)
        engine = stack.enter_context(engine_for(case))
        losses = [engine_step(engine, case, 0)]
        kind, _ = raised(engine.state_dict if dist.get_rank() == 0 else lambda: engine_step(engine, case, 1))
        engine.disconnect()
        give_timeout(None)
        _join(folder / "again")
        engine.reconnect()
        losses += [engine_step(engine, case, step) for step in (1, 2)]
    return kind, losses


def test_an_engine_trains_on_after_a_mismatch(
    two: Pool, plain: Callable[[Case, int], Trajectory], tmp_path: Path
) -> None:
    said = two.run(train_on_after_a_mismatch, 3, tmp_path, timeout=60)
    assert all(kind in ("PeerLost", "CollectiveMismatch") for kind, _ in said), said
    means = [sum(each) / 2 for each in zip(*(losses for _, losses in said), strict=True)]
    assert means == pytest.approx(plain(Case(stage=3, steps=3), 2).losses, rel=1e-5)
