"""The shared-memory backend through torch.distributed: every collective, dtype, size and layout; messages; what
happens when a rank leaves, dies or does not come; and that nothing is left behind.

Sizes stand around the boundaries of the staging area, so that the last round is full, one element short, or has one
element; expected values are computed on every rank from what the others are known to hold.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import gc
import itertools
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks.conftest import PoolOf
from ranks.pool import ENVIRONMENT, Pool
from ranks.test_collectives import rank_sum
from speedlab.comm import CollectiveMismatch, PeerLost, leave
from speedlab.comm.shared import BACKEND, SharedGroup, arena, register
from speedlab.comm.shared.sync_page import STAGING_BYTES

DTYPES = ["float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8"]

# torch 2.13 renamed the two; 2.11 and 2.12 have the older names only.
gather_whole: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_sum: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def values(rank: int, numel: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """What `rank` contributes: the same on every rank that asks. Repeats after a prime number of elements."""
    drawn = _drawn(1000 * seed + rank, dtype)
    return drawn.repeat(-(-numel // drawn.numel()))[:numel]


@functools.cache
def _drawn(seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(10_007, generator=generator) < 0.5
    if dtype.is_floating_point:
        return torch.randn(10_007, generator=generator).to(dtype)
    return torch.randint(0, 200, (10_007,), generator=generator).to(dtype)


def sizes(dtype: torch.dtype, share: int = 1) -> list[int]:
    """Elements: none, few, and around the boundaries of a staging area that `share` ranks divide."""
    edges = [(16 << 10) // dtype.itemsize, STAGING_BYTES // (dtype.itemsize * share)]
    return [0, 1, 7, *(edge + off for edge in edges for off in (-1, 0, 1)), 2 * edges[1] + edges[1] // 2 + 3]


def same(ours: Tensor, expected: Tensor, *what: Any) -> None:
    assert ours.dtype == expected.dtype, what
    assert ours.shape == expected.shape, what
    assert torch.equal(ours, expected), (*what, (ours != expected).nonzero()[:5].tolist())


def place(group: Any = None) -> tuple[int, list[int]]:
    """(this rank's index in `group`, global ranks of the group)."""
    return dist.get_rank(group), dist.get_process_group_ranks(group or dist.group.WORLD)


@contextlib.contextmanager
def new_group(ranks: Sequence[int], **options: Any) -> Iterator[Any]:
    """A group that is destroyed at the end; outside `ranks` only its making takes part."""
    group: Any = dist.new_group(list(ranks), **options)
    try:
        yield group
    finally:
        if dist.get_rank() in ranks:
            dist.destroy_process_group(group)


# ---- reductions ------------------------------------------------------------------------------------------------------


def total(terms: list[Tensor]) -> Tensor:
    """In rank order; 16-bit floats in float32, rounded once; integers wrap around."""
    return rank_sum(terms) if terms[0].is_floating_point() else functools.reduce(torch.add, terms)


def mean(terms: list[Tensor]) -> Tensor:
    """Floats as `total`; of integers rounded down, of the sum before it wraps around."""
    dtype = terms[0].dtype
    if not dtype.is_floating_point:
        return torch.div(total([term.long() for term in terms]), len(terms), rounding_mode="floor").to(dtype)
    return (total([term.float() if dtype.itemsize == 2 else term for term in terms]) / len(terms)).to(dtype)


REDUCTIONS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "SUM": total,
    "AVG": mean,
    "MIN": lambda terms: functools.reduce(torch.minimum, terms),
    "MAX": lambda terms: functools.reduce(torch.maximum, terms),
    "PRODUCT": lambda terms: functools.reduce(torch.mul, terms),
}


def reduce_everywhere(dtype_name: str, ops: Sequence[str], members: Sequence[int] | None = None) -> None:
    """all_reduce, reduce_scatter of a list and of a tensor: all sizes, each beside what it must give, to the bit."""
    with contextlib.ExitStack() as stack:
        if members is not None:
            group = stack.enter_context(new_group(members))
            if dist.get_rank() not in members:
                return
        else:
            group = None
        dtype = getattr(torch, dtype_name)
        index, ranks = place(group)
        n = len(ranks)
        for name in ops:
            op, expected = getattr(dist.ReduceOp, name), REDUCTIONS[name]
            for numel in sizes(dtype) if name == "SUM" else [0, 7, sizes(dtype)[-1]]:
                tensor = values(ranks[index], numel, dtype)
                dist.all_reduce(tensor, op, group=group)
                same(tensor, expected([values(r, numel, dtype) for r in ranks]), "all_reduce", name, numel)
            for numel in sizes(dtype, n) if name == "SUM" else [0, 7, sizes(dtype, n)[-1]]:
                wholes = [values(r, n * numel, dtype, seed=1) for r in ranks]
                right = expected([whole.view(n, -1)[index] for whole in wholes])
                out = torch.empty(numel, dtype=dtype)
                scatter_sum(out, wholes[index].clone(), op, group=group)
                same(out, right, "reduce_scatter of a tensor", name, numel)
                if numel <= 7:
                    out = torch.empty(numel, dtype=dtype)
                    dist.reduce_scatter(out, list(wholes[index].clone().view(n, -1).unbind()), op, group=group)
                    same(out, right, "reduce_scatter of a list", name, numel)


@pytest.mark.parametrize("dtype", DTYPES)
def test_reductions(ranks: Pool, dtype: str) -> None:
    ranks.run(reduce_everywhere, dtype, list(REDUCTIONS))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_reductions_of_three_ranks(pool_of: PoolOf, dtype: str) -> None:
    """A size that divides nothing, in a sub-group whose indices are not the ranks."""
    pool_of(4).run(reduce_everywhere, dtype, ["SUM", "MAX"], [1, 2, 3])


def reduce_bools_and_bits() -> None:
    """Bits of integers are reduced here; booleans go to gloo, as everything else that kernels do not know."""
    rank, ranks = place()
    terms = [values(r, 1000, torch.int32) for r in ranks]
    for name, pair in (("BAND", torch.bitwise_and), ("BOR", torch.bitwise_or), ("BXOR", torch.bitwise_xor)):
        tensor = terms[rank].clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        same(tensor, functools.reduce(pair, terms), name)
    flags = [values(r, 1000, torch.bool) for r in ranks]
    for name, pair in (("MAX", torch.logical_or), ("MIN", torch.logical_and)):
        tensor = flags[rank].clone()
        dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
        same(tensor, functools.reduce(pair, flags), "bool", name)


def test_reductions_of_bools_and_bits(ranks: Pool) -> None:
    ranks.run(reduce_bools_and_bits)


def special_values() -> None:
    """NaN and infinities survive; opposite infinities make NaN; denormals are added exactly."""
    rank, ranks = place()
    n = len(ranks)
    inf, nan, tiny = float("inf"), float("nan"), 2.0**-149
    for numel_of_each in (1, 5000):
        given = [nan if rank == n - 1 else 1.0, inf, inf if rank == 0 else -inf, tiny, -0.0]
        tensor = torch.tensor(given).repeat(numel_of_each)
        dist.all_reduce(tensor)
        seen = tensor.view(numel_of_each, 5)
        assert seen[:, 0].isnan().all()
        assert seen[:, 1].eq(inf).all()
        assert seen[:, 2].isnan().all() if n > 1 else seen[:, 2].eq(inf).all()
        assert seen[:, 3].eq(n * tiny).all()
        assert seen[:, 4].eq(0).all()


def test_special_values(ranks: Pool) -> None:
    ranks.run(special_values)


# ---- copies ----------------------------------------------------------------------------------------------------------


def copy_everywhere(dtype_name: str) -> None:
    """all_gather of a list and of a tensor, broadcast, all_to_all of a tensor and of a list."""
    dtype = getattr(torch, dtype_name)
    rank, ranks = place()
    n = len(ranks)
    for numel in sizes(dtype):
        parts = [values(r, numel, dtype) for r in ranks]
        outs = [torch.empty(numel, dtype=dtype) for _ in ranks]
        dist.all_gather(outs, parts[rank])
        same(torch.cat(outs), torch.cat(parts), "all_gather of a list", numel)
        out = torch.empty(n * numel, dtype=dtype)
        gather_whole(out, parts[rank])
        same(out, torch.cat(parts), "all_gather of a tensor", numel)
        for source in {0, n - 1}:
            tensor = parts[rank].clone()
            dist.broadcast(tensor, source)
            same(tensor, parts[source], "broadcast", source, numel)
    for numel in sizes(dtype, n):
        wholes = [values(r, n * numel, dtype, seed=2) for r in ranks]
        right = torch.cat([whole.view(n, -1)[rank] for whole in wholes])
        out = torch.empty(n * numel, dtype=dtype)
        dist.all_to_all_single(out, wholes[rank].clone())
        same(out, right, "all_to_all of a tensor", numel)
        outs = [torch.empty(numel, dtype=dtype) for _ in ranks]
        dist.all_to_all(outs, list(wholes[rank].view(n, -1).unbind()))
        same(torch.cat(outs), right, "all_to_all of a list", numel)


@pytest.mark.parametrize("dtype", [*DTYPES, "bool"])
def test_copies(ranks: Pool, dtype: str) -> None:
    ranks.run(copy_everywhere, dtype)


def split_unevenly(factor: int, lists: bool = True) -> None:
    """Rank r sends r + 2k + 1 (times `factor`) elements to rank k, none to the next one."""
    rank, ranks = place()
    n = len(ranks)

    def count(sender: int, receiver: int) -> int:
        return 0 if n > 1 and receiver == (sender + 1) % n else factor * (sender + 2 * receiver + 1)

    def sent(sender: int) -> list[Tensor]:
        whole = values(sender, sum(count(sender, k) for k in ranks), torch.float32)
        return list(whole.split([count(sender, k) for k in ranks]))

    right = torch.cat([sent(r)[rank] for r in ranks])
    out = torch.empty_like(right)
    received = [count(r, rank) for r in ranks]
    dist.all_to_all_single(out, torch.cat(sent(rank)), received, [count(rank, k) for k in ranks])
    same(out, right, "all_to_all_single")
    if lists:
        outs = [torch.empty(k) for k in received]
        dist.all_to_all(outs, sent(rank))
        same(torch.cat(outs), right, "all_to_all")


@pytest.mark.parametrize("factor", [1, 1000, 100_003])
def test_all_to_all_of_uneven_parts(ranks: Pool, factor: int) -> None:
    ranks.run(split_unevenly, factor)


def mismatched_all_to_all() -> str:
    rank = dist.get_rank()
    try:
        dist.all_to_all_single(torch.zeros(4), torch.zeros(6 if rank else 4), [2, 2], [3, 3] if rank else [2, 2])
    except CollectiveMismatch as error:
        return str(error)
    return "nothing noticed"


def test_all_to_all_of_parts_that_do_not_match(two: Pool) -> None:
    said = two.run(mismatched_all_to_all)
    two.new_group()
    for message in said:
        assert message.startswith("all_to_all: rank 1 sends 3 elements to rank 0, which expects 2.")


def coalesced() -> None:
    """Several tensors in one call, and the coalescing manager."""
    rank, ranks = place()
    n = len(ranks)
    world: Any = dist.group.WORLD
    for dtype in (torch.float32, torch.bfloat16):
        tensors = [values(rank, k, dtype, seed=k) for k in (3, 0, 5000, STAGING_BYTES // 2)]
        right = [rank_sum([values(r, t.numel(), dtype, seed=t.numel()) for r in ranks]) for t in tensors]
        world.allreduce_coalesced(tensors, dist.AllreduceCoalescedOptions()).wait()
        for tensor, expected in zip(tensors, right, strict=True):
            same(tensor, expected, "allreduce_coalesced")

    parts = [values(rank, k, torch.float32) for k in (1, 9)]
    wholes = [torch.zeros(n * k) for k in (1, 9)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for whole, part in zip(wholes, parts, strict=True):
            gather_whole(whole, part)
    manager.wait()
    for whole, part in zip(wholes, parts, strict=True):
        same(whole, torch.cat([values(r, part.numel(), torch.float32) for r in ranks]), "coalesced all_gather")

    given = [values(rank, n * k, torch.float32) for k in (1, 9)]
    outs = [torch.zeros(k) for k in (1, 9)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for out, whole in zip(outs, given, strict=True):
            scatter_sum(out, whole)
    manager.wait()
    for out in outs:
        right_one = rank_sum([values(r, n * out.numel(), torch.float32) for r in ranks]).view(n, -1)[rank]
        same(out, right_one, "coalesced reduce_scatter")


def test_coalesced(ranks: Pool) -> None:
    ranks.run(coalesced)


# ---- layouts of memory -----------------------------------------------------------------------------------------------


def odd_memory() -> None:
    """Tensors that begin in the middle of a word, and tensors that are not contiguous."""
    rank, ranks = place()
    n = len(ranks)
    for dtype in (torch.float32, torch.bfloat16, torch.uint8):
        for numel in (5, 9000, STAGING_BYTES // dtype.itemsize + 1):
            terms = [values(r, numel, dtype) for r in ranks]
            summed = total(terms)

            memory = torch.zeros(numel + 2, dtype=dtype)
            memory[1:-1] = terms[rank]
            dist.all_reduce(memory[1:-1])
            same(memory[1:-1], summed, "all_reduce [1:]", numel)
            assert memory[0] == memory[-1] == 0, "nothing beside it is touched"

            memory = torch.zeros(n * numel + 1, dtype=dtype)
            gather_whole(memory[1:], terms[rank])
            same(memory[1:], torch.cat(terms), "all_gather [1:]", numel)

            strided = torch.zeros(numel, 2, dtype=dtype)
            strided[:, 1] = terms[rank]
            dist.all_reduce(strided[:, 1])
            same(strided[:, 1], summed, "all_reduce of a column", numel)
            assert not strided[:, 0].any()

            strided[:, 1] = terms[rank]
            dist.broadcast(strided[:, 1], n - 1)
            same(strided[:, 1], terms[n - 1], "broadcast of a column", numel)

            columns = torch.zeros(numel, n, dtype=dtype)
            strided[:, 1] = terms[rank]
            dist.all_gather(list(columns.unbind(1)), strided[:, 1])
            same(columns, torch.stack(terms, 1), "all_gather into columns", numel)

            out = torch.zeros(numel, 2, dtype=dtype)
            dist.reduce_scatter(out[:, 0], [strided[:, 1] for _ in ranks])
            same(out[:, 0], summed, "reduce_scatter of columns", numel)

    square = torch.arange(12.0).view(3, 4).t()
    dist.all_reduce(square)
    same(square, n * torch.arange(12.0).view(3, 4).t(), "a transposed matrix")
    scalar = torch.tensor(rank + 1.0)
    dist.all_reduce(scalar)
    assert scalar.item() == n * (n + 1) / 2


def test_unaligned_and_strided_tensors(ranks: Pool) -> None:
    ranks.run(odd_memory)


def gradients_are_left_alone() -> None:
    """Parameters that require gradients are communicated as they are; no graph is recorded."""
    parameter = torch.nn.Parameter(torch.full((10,), float(dist.get_rank())))
    dist.broadcast(parameter, 0)
    assert parameter.eq(0).all()
    with torch.no_grad():
        dist.all_reduce(parameter)
    assert parameter.grad_fn is None


def test_parameters(ranks: Pool) -> None:
    ranks.run(gradients_are_left_alone)


# ---- asynchronous ----------------------------------------------------------------------------------------------------


def overlapping() -> None:
    """Collectives of all kinds under way at once, waited for in any order, and synchronous ones among them."""
    rank, ranks = place()
    n = len(ranks)
    tensors = [values(rank, 1 + 40_000 * (k % 3), torch.float32, seed=k) for k in range(12)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    late = torch.tensor([float(rank)])
    dist.all_reduce(late)  # Must not overtake what is under way.
    assert late.item() == n * (n - 1) / 2
    whole = torch.empty(n * 7)
    works.append(gather_whole(whole, values(rank, 7, torch.float32), async_op=True))
    works.append(dist.barrier(async_op=True))
    for work in [*works[6:], *reversed(works[:6])]:
        assert work is not None
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    for k, tensor in enumerate(tensors):
        same(tensor, rank_sum([values(r, tensor.numel(), torch.float32, seed=k) for r in ranks]), k)
    same(whole, torch.cat([values(r, 7, torch.float32) for r in ranks]))

    work = dist.all_reduce(torch.ones(3), async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    assert doubled.wait().tolist() == [2.0 * n] * 3
    work.wait()


def test_asynchronous_collectives(ranks: Pool) -> None:
    ranks.run(overlapping)


def many_small_ones() -> None:
    rank, ranks = place()
    n = len(ranks)
    tensor = torch.zeros(1, dtype=torch.int64)
    for k in range(2000):
        tensor.fill_(rank + k)
        dist.all_reduce(tensor)
        assert tensor.item() == n * k + n * (n - 1) // 2, k
        if k % 7 == 0:
            dist.broadcast(tensor, k % n)
        if k % 11 == 0:
            dist.barrier()


def test_many_small_ones_in_a_row(ranks: Pool) -> None:
    ranks.run(many_small_ones)


# ---- sub-groups ------------------------------------------------------------------------------------------------------


def several_groups() -> None:
    """Rows and columns of a 2 × 2 grid, and pairs across, each with the others' collectives under way."""
    rank = dist.get_rank()
    teams = [[0, 1], [2, 3], [0, 2], [1, 3], [0, 3], [2, 1]]
    with contextlib.ExitStack() as stack:
        groups = [(stack.enter_context(new_group(team)), team) for team in teams]
        mine = [(group, team) for group, team in groups if rank in team]
        assert len(mine) == 3
        assert all(isinstance(group, SharedGroup) for group, _ in mine)
        tensors = [values(rank, 100_000, torch.float32, seed=k) for k in range(3)]
        works = [dist.all_reduce(t, group=g, async_op=True) for t, (g, _) in zip(tensors, mine, strict=True)]
        for work in reversed(works):
            assert work is not None
            work.wait()
        for k, (tensor, (group, team)) in enumerate(zip(tensors, mine, strict=True)):
            # new_group sorts its ranks.
            same(tensor, rank_sum([values(r, 100_000, torch.float32, seed=k) for r in sorted(team)]), team)
            reported = torch.tensor([rank])
            dist.broadcast(reported, group_src=1, group=group)
            assert reported.item() == sorted(team)[1]
    dist.barrier()


def test_sub_groups(pool_of: PoolOf) -> None:
    pool_of(4).run(several_groups)


# ---- messages --------------------------------------------------------------------------------------------------------


def exchange_messages() -> None:
    """Both send first; sizes from nothing to several staging areas; dtypes; a strided receiver."""
    rank = dist.get_rank()
    other = 1 - rank
    for numel in (0, 1, 1001, STAGING_BYTES):
        for dtype in (torch.float32, torch.bfloat16, torch.bool):
            dist.send(values(rank, numel, dtype), other)
            received = torch.empty(numel, dtype=dtype)
            assert dist.recv(received, other) == other
            same(received, values(other, numel, dtype), numel)
    dist.send(values(rank, 20, torch.float32).view(4, 5).t(), other)
    columns = torch.zeros(5, 8)
    dist.recv(columns[:, ::2], other)
    same(columns[:, ::2], values(other, 20, torch.float32).view(4, 5).t())
    assert not columns[:, 1::2].any()


def test_messages(two: Pool) -> None:
    two.run(exchange_messages)


def crossing_messages() -> None:
    """Receives in another order than the sends, told apart by tag; of one tag, first come first served."""
    rank = dist.get_rank()
    other = 1 - rank
    sent = [torch.full((50,), 100.0 * rank + k) for k in range(6)]
    tags = [7, 7, 3, 9, 7, 3]
    sends = [dist.isend(tensor, other, tag=tag) for tensor, tag in zip(sent, tags, strict=True)]
    for tensor in sent:
        tensor.zero_()  # It was copied: what is sent may change at once.
    order = [3, 2, 0, 5, 1, 4]
    received = [torch.empty(50) for _ in order]
    receives = [dist.irecv(received[k], other, tag=tags[k]) for k in order]
    for work in [*reversed(receives), *sends]:
        assert work is not None
        work.wait()
    assert [tensor[0].item() for tensor in received] == [100.0 * other + k for k in range(6)]


def test_messages_cross_and_are_told_apart_by_tag(two: Pool) -> None:
    two.run(crossing_messages)


def many_crossing_messages() -> list[float]:
    """Each sends more than can be on their way, before it begins to receive."""
    rank, count = dist.get_rank(), 600
    other = 1 - rank
    for number in range(count):
        dist.send(torch.tensor([1000.0 * rank + number]), other)
    received = [torch.empty(1) for _ in range(count)]
    for tensor in received:
        dist.recv(tensor, other)
    return [tensor.item() for tensor in received]


def test_any_number_of_messages_may_cross(two: Pool) -> None:
    results = two.run(many_crossing_messages, timeout=40)
    assert results == [[1000.0 * (1 - rank) + number for number in range(600)] for rank in range(2)]


def a_message_of_another_size() -> tuple[bool, list[float], str]:
    """It comes before the one that is waited for; (whether looking was enough for that, what it held, and what is said
    of the other)."""
    if dist.get_rank() == 0:
        dist.send(torch.ones(3), 1, tag=2)
        dist.send(torch.ones(5), 1, tag=1)
        dist.barrier()
        return True, [1.0] * 5, ""
    good, bad = torch.zeros(5), torch.zeros(4)
    expected, odd = dist.irecv(good, 0, tag=1), dist.irecv(bad, 0, tag=2)
    dist.barrier()
    assert expected is not None
    assert odd is not None
    seen = expected.is_completed()
    expected.wait()
    said = ""
    try:
        odd.wait()
    except PeerLost as error:
        said = str(error)
    return seen, good.tolist(), said


def test_a_message_of_another_size_is_the_error_of_who_expects_it(two: Pool) -> None:
    _, (seen, received, said) = two.run(a_message_of_another_size)
    two.new_group()
    assert seen, "a loop that looks, instead of waiting, comes to its end"
    assert received == [1.0] * 5
    assert said.startswith("Rank 1 expected 4 float32 from rank 0 with tag 2, which sent 3 float32.")


def ring_of_messages() -> None:
    rank, ranks = place()
    n = len(ranks)
    for numel in (1, 3000):
        out, received = values(rank, numel, torch.float32), torch.empty(numel)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, out, (rank + 1) % n), dist.P2POp(dist.irecv, received, (rank - 1) % n)]
        )
        for work in works:
            work.wait()
        same(received, values((rank - 1) % n, numel, torch.float32))


def from_anybody() -> list[int]:
    """Rank 0 takes a message of each peer, whoever comes first; the others send theirs in turn, the last one first."""
    rank, ranks = place()
    n, seen = len(ranks), []
    if rank == 0:
        tensor = torch.zeros(3)
        for turn in range(n - 1, 0, -1):
            seen.append(dist.recv(tensor))
            same(tensor, values(seen[-1], 3, torch.float32))
            if turn > 1:
                dist.send(torch.zeros(1), turn - 1)
    else:
        if rank < n - 1:
            dist.recv(torch.zeros(1), 0)
        dist.send(values(rank, 3, torch.float32), 0)
    return seen


@pytest.mark.parametrize("ranks", [2, 4], indirect=True)
def test_rings_and_messages_from_anybody(ranks: Pool) -> None:
    ranks.run(ring_of_messages)
    assert ranks.run(from_anybody)[0] == list(range(ranks.size - 1, 0, -1))


def flood_of_messages() -> int:
    """More messages than a ring holds, received late: the sender waits for room, and buffers are used again."""
    rank = dist.get_rank()
    before = arena().nbytes
    if rank == 0:
        for k in range(1500):
            dist.send(torch.full((8,), float(k)), 1)
        dist.recv(torch.zeros(1), 1)
    else:
        tensor = torch.zeros(8)
        for k in range(1500):
            dist.recv(tensor, 0)
            assert tensor[0] == k
        dist.send(torch.zeros(1), 0)
    return arena().nbytes - before


def test_more_messages_than_fit(two: Pool) -> None:
    grown = two.run(flood_of_messages)
    assert max(grown) <= 300 * 4096, "no more buffers than messages that may be under way"


# ---- what goes to gloo, and objects ----------------------------------------------------------------------------------


def fall_through() -> None:
    rank, ranks = place()
    n = len(ranks)
    part = values(rank, 5, torch.float32)
    outs = [torch.empty(5) for _ in ranks] if rank == n - 1 else None
    dist.gather(part, outs, dst=n - 1)
    if outs is not None:
        same(torch.cat(outs), torch.cat([values(r, 5, torch.float32) for r in ranks]), "gather")
    out = torch.empty(5)
    dist.scatter(out, [values(r, 5, torch.float32, seed=4) for r in ranks] if rank == 0 else None, src=0)
    same(out, values(rank, 5, torch.float32, seed=4), "scatter")
    total = part.clone()
    dist.reduce(total, dst=0)
    if rank == 0:
        torch.testing.assert_close(total, rank_sum([values(r, 5, torch.float32) for r in ranks]))
    objects: list[Any] = [None] * n
    dist.all_gather_object(objects, {"rank": rank, "text": "x" * 3000 * rank})
    assert objects == [{"rank": r, "text": "x" * 3000 * r} for r in ranks]
    reported: list[Any] = [f"from {rank}", rank]
    dist.broadcast_object_list(reported, src=n - 1)
    assert reported == [f"from {n - 1}", n - 1]


def test_what_goes_to_gloo(ranks: Pool) -> None:
    ranks.run(fall_through)


def bad_input() -> list[str]:
    """Nobody sends anything: each call is refused on the rank that makes it."""
    said = []
    for call in (
        lambda: gather_whole(torch.zeros(3), torch.zeros(2)),
        lambda: scatter_sum(torch.zeros(2), torch.zeros(3)),
        lambda: dist.all_gather([torch.zeros(2), torch.zeros(3)], torch.zeros(2)),
        lambda: dist.reduce_scatter(torch.zeros(2), [torch.zeros(2), torch.zeros(3)]),
        lambda: dist.all_gather([torch.zeros(2), torch.zeros(2, dtype=torch.float64)], torch.zeros(2)),
        lambda: dist.all_gather([torch.zeros(2)], torch.zeros(2)),
        lambda: dist.all_to_all([torch.zeros(2)], [torch.zeros(2)]),
        lambda: dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 1, 2], [2, 2]),
    ):
        try:
            call()
        except (ValueError, RuntimeError, TypeError) as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("nothing noticed")
    dist.barrier()
    return said


def test_tensors_that_do_not_fit_are_refused_before_memory_is_touched(two: Pool) -> None:
    for said in two.run(bad_input):
        assert "nothing noticed" not in said, said
        assert said[2] == (
            "ValueError: all_gather: tensor 1 of the list is (3,) torch.float32, the single one (2,) torch.float32; "
            "expected as many elements of the same dtype"
        )


# ---- ranks that are lost ---------------------------------------------------------------------------------------------

COLLECTIVES: dict[str, Callable[[Any, int], Any]] = {
    "all_reduce": lambda group, _: dist.all_reduce(torch.zeros(3), group=group),
    "all_gather": lambda group, n: gather_whole(torch.zeros(3 * n), torch.zeros(3), group=group),
    "barrier": lambda group, _: dist.barrier(group),
    "asynchronous": lambda group, _: dist.all_reduce(torch.zeros(3), group=group, async_op=True).wait(),  # type: ignore[union-attr]  # a work, since it is asynchronous
    "recv": lambda group, n: dist.recv(torch.zeros(3), group=group, group_src=n - 1),
    "recv from anybody": lambda group, _: dist.recv(torch.zeros(3), group=group),
}


def one_never_comes(seconds: float) -> dict[str, tuple[str, float]]:
    """The last rank takes no part; what the others are told, and after how long."""
    n, said = dist.get_world_size(), {}
    for name, collective in COLLECTIVES.items():
        with new_group(range(n), timeout=datetime.timedelta(seconds=seconds)) as group:
            if dist.get_rank() < n - 1:
                began = time.monotonic()
                try:
                    collective(group, n)
                except PeerLost as error:
                    said[name] = str(error), time.monotonic() - began
            dist.barrier()
    return said


def test_rank_that_does_not_come_is_named_after_the_timeout(two: Pool) -> None:
    first, second = two.run(one_never_comes, 0.6, timeout=40)
    assert second == {}
    assert set(first) == set(COLLECTIVES)
    for name, (message, seconds) in first.items():
        assert message.startswith("rank 0 waited for rank 1"), name
        assert "rank 1 did not come within 0.6 s" in message, name
        assert seconds >= 0.6, name


def one_leaves() -> dict[str, str]:
    n, said = dist.get_world_size(), {}
    for name, collective in COLLECTIVES.items():
        with new_group(range(n)) as group:
            dist.barrier(group)
            if dist.get_rank() == n - 1:
                group.leave()
            else:
                try:
                    collective(group, n)
                except PeerLost as error:
                    said[name] = str(error)
            dist.barrier()
    return said


def test_rank_that_leaves_is_named_at_once(two: Pool) -> None:
    first, _ = two.run(one_leaves, timeout=40)
    assert set(first) == set(COLLECTIVES)
    for name, message in first.items():
        assert message.startswith("rank 0 waited for rank 1"), name
        assert message.endswith("rank 1 left"), name


def leave_while_waiting() -> str:
    """A rank that leaves while its own thread waits for a peer: the wait ends."""
    with new_group([0, 1]) as group:
        said = ""
        if dist.get_rank() == 0:
            work = dist.all_reduce(torch.zeros(3), group=group, async_op=True)
            group.leave()
            try:
                work.wait()  # type: ignore[union-attr]  # a work, since it is asynchronous
            except PeerLost as error:
                said = str(error)
        dist.barrier()
    return said


def test_leaving_ends_ones_own_waits(two: Pool) -> None:
    message = two.run(leave_while_waiting, timeout=20)[0]
    assert message == "rank 0 waited for rank 1 in a collective: rank 0 itself left"


def last_words() -> list[float]:
    """Rank 0 sends and leaves at once; its message must still be read, or be reported as lost, naming it."""
    heard: list[float] = []
    with new_group([0, 1]) as group:
        if dist.get_rank() == 0:
            dist.send(torch.arange(3.0), group=group, group_dst=1)
            group.leave()
        dist.barrier()
        if dist.get_rank() == 1:
            tensor = torch.zeros(3)
            dist.recv(tensor, group=group, group_src=0)
            heard = tensor.tolist()
        dist.barrier()
    return heard


def test_last_message_of_a_rank_that_left_is_read(two: Pool) -> None:
    assert two.run(last_words, timeout=20)[1] == [0.0, 1.0, 2.0]


def leave_a_message_after() -> tuple[list[float], int]:
    """Rank 0 sends, and has destroyed the group with the message in it, and used its memory for other things, before
    rank 1 looks. What it heard; and what is left of the message afterwards, in bytes."""
    before = arena().nbytes
    tensor = torch.zeros(3)
    group: Any = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        dist.send(torch.arange(3.0), group=group, group_dst=1)
        group.leave()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        others = [arena().empty(1024, torch.float32).fill_(9) for _ in range(20)]
        dist.barrier()
        del others
    else:
        dist.barrier()
        dist.recv(tensor, group=group, group_src=0)
        dist.destroy_process_group(group)
    dist.barrier()
    return tensor.tolist(), arena().nbytes - before


def test_message_outlives_the_group_it_was_sent_in(two: Pool) -> None:
    assert two.run(leave_a_message_after, timeout=20) == [([0.0] * 3, 0), ([0.0, 1.0, 2.0], 0)]


def interrupted(how: str) -> str:
    """Rank 0 is sent SIGINT while it waits for rank 1, which comes only afterwards."""
    rank = dist.get_rank()
    outcome = "nothing"
    with new_group([0, 1]) as group:
        if rank == 0:
            before = signal.signal(signal.SIGINT, signal.default_int_handler)
            timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                COLLECTIVES[how](group, 2)
            except KeyboardInterrupt:
                outcome = "interrupted"
            finally:
                signal.signal(signal.SIGINT, before)
                timer.join()
        dist.barrier()
    return outcome


@pytest.mark.parametrize("how", list(COLLECTIVES))
def test_ctrl_c_ends_a_wait(two: Pool, how: str) -> None:
    assert two.run(interrupted, how, timeout=20)[0] == "interrupted"


# ---- killed ----------------------------------------------------------------------------------------------------------


def work_until_someone_dies(rank: int, size: int, store: str, parent: Connection) -> None:
    """In groups of `size`, size - 1, … 2 ranks: endless collectives until the last one is killed from outside.

    Tells the parent ("inside", phase) when it is well inside, and the message when it was told of the loss.
    """
    dist.init_process_group(BACKEND, init_method=f"file://{store}", rank=rank, world_size=size)
    groups = {n: dist.new_group(list(range(n))) for n in range(2, size + 1)}
    dist.barrier()
    for n in range(size, max(1, rank), -1):
        group: Any = groups[n]
        try:
            for turn in itertools.count():
                dying_collective(n, group, rank)
                if turn == 20:
                    parent.send(("inside", n))
        except PeerLost as error:
            parent.send(str(error))
    parent.recv()  # The parent has looked at /dev/shm while this process lived.
    leave()


def dying_collective(n: int, group: Any, rank: int) -> None:
    if n == 4:
        dist.all_reduce(torch.zeros(3 * STAGING_BYTES // 8), group=group)
    elif n == 3:
        works = [dist.isend(torch.zeros(500), group=group, group_dst=(rank + 1) % n)]
        works.append(dist.irecv(torch.zeros(500), group=group, group_src=(rank - 1) % n))
        for work in works:
            assert work is not None
            work.wait()
        dist.barrier(group)
    else:
        work = dist.all_reduce(torch.zeros(1000), group=group, async_op=True)
        assert work is not None
        work.wait()


def serve(rank: int, size: int, store: str, parent: Connection) -> None:
    os.environ.update(ENVIRONMENT)
    torch.set_num_threads(1)
    register()
    work_until_someone_dies(rank, size, store, parent)


def test_killed_rank_is_named_at_once_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """kill -9 inside an all-reduce of several rounds, inside messages, and inside an asynchronous collective."""
    size, context = 4, multiprocessing.get_context("spawn")
    before = files_in_memory()
    pipes = [context.Pipe() for _ in range(size)]
    ranks = [
        context.Process(target=serve, args=(rank, size, str(tmp_path / "store"), theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    try:
        for n in range(size, 1, -1):
            for rank in range(n):
                assert receive(pipes[rank][0], 60) == ("inside", n)
            ranks[n - 1].kill()
            for rank in range(n - 1):
                message = receive(pipes[rank][0], 20)
                assert message.startswith(f"rank {rank} waited for rank {n - 1} in a collective: "), message
                assert message.endswith(f"the process of rank {n - 1} has ended"), message
        assert files_in_memory() <= before
        pipes[0][0].send("look is over")
        ranks[0].join(20)
        assert ranks[0].exitcode == 0
    finally:
        for process in ranks:
            process.kill()
            process.join(5)
    assert files_in_memory() <= before


def files_in_memory() -> set[str]:
    """Names, but for those of runs that tests beside this one reshape meanwhile; ranks here make none."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("speedlab-state-")}


def receive(connection: Connection, seconds: float) -> Any:
    assert connection.poll(seconds), "no answer"
    return connection.recv()


# ---- what stays ------------------------------------------------------------------------------------------------------


def use_groups(count: int) -> dict[str, int]:
    """Make, use and destroy so many groups; then what this process still holds of them."""
    rank, ranks = place()
    n = len(ranks)
    dist.barrier()
    before = set(threading.enumerate())
    for k in range(count):
        with new_group(ranks) as group:
            dist.all_reduce(torch.zeros(100_000), group=group)
            work = dist.all_reduce(torch.zeros(10), group=group, async_op=True)
            assert work is not None
            work.wait()
            dist.send(torch.zeros(10), group=group, group_dst=(rank + 1) % n)
            dist.recv(torch.zeros(10), group=group, group_src=(rank - 1) % n)
            if k % 2:
                group.leave()
            dist.barrier()
    del group, work
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("shared memory"):
            thread.join(10)
    gc.collect()
    dist.barrier()
    in_arena = arena().nbytes  # Asked first: it lets go of what peers have read since this rank has left a group.
    descriptors = os.listdir("/proc/self/fd")
    opened = [os.readlink(f"/proc/self/fd/{name}") for name in descriptors if os.path.exists(f"/proc/self/fd/{name}")]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return {
        "open segments": sum("memfd:speedlab" in path for path in opened),
        "mapped segments": sum("memfd:speedlab" in line for line in mapped),
        "descriptors of processes": sum("pidfd" in path for path in opened),
        "threads": threading.active_count(),
        "bytes of the arena": in_arena,
    }


def hold_no_tensors() -> bool:
    """An idle thread keeps nothing of its last collective alive."""
    tensor, freed = torch.zeros(1000), threading.Event()
    weakref.finalize(tensor, freed.set)
    work: Any = dist.all_reduce(tensor, async_op=True)
    work.wait()
    del tensor, work
    return freed.wait(10)  # The thread lets go of it just after it has told that it is over.


def test_tensors_of_the_last_collective_are_freed(two: Pool) -> None:
    assert two.run(hold_no_tensors) == [True, True]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.nightly)], indirect=True)
def test_groups_leave_nothing_behind(ranks: Pool) -> None:
    first = ranks.run(use_groups, 3)
    assert ranks.run(use_groups, 6) == first
