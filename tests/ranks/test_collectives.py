"""speedlab.comm: collectives give the right values in every dtype, count what they send, and name a lost peer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks.conftest import GLOO, PoolOf, on_both_backends
from ranks.pool import Pool
from speedlab.comm import CommStats, Group, PeerLost, join, leave
from speedlab.comm.transports.nccl import Exchanging
from speedlab.network import free_port

SIZES = [0, 1, 5, 1000]
"""Elements of a shard."""


def group(channel: str = "gather") -> Group:
    return Group(list(range(dist.get_world_size())), CommStats(), torch.device("cpu"), channel=channel)


def values_of(rank: int, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """What `rank` contributes: the same on every rank that asks."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(count, generator=generator).to(dtype)


def rank_sum(terms: list[Tensor]) -> Tensor:
    """The sum in rank order, in float32 where the terms are narrower, rounded once."""
    total = terms[0].float() if terms[0].dtype.itemsize < 4 else terms[0].clone()
    for term in terms[1:]:
        total = total + term
    return total.to(terms[0].dtype)


# ---- values ----------------------------------------------------------------------------------------------------------


def gather_and_scatter(dtype_name: str) -> None:
    """all_gather, reduce_scatter and all_reduce of several sizes, each beside what it must give, to the bit."""
    dtype = getattr(torch, dtype_name)
    wires = group()
    size, rank = wires.size, wires.index
    for count in SIZES:
        shards = [values_of(r, count, dtype) for r in range(size)]
        full = torch.full((size * count,), 7, dtype=dtype)
        wires.all_gather(full, shards[rank]).wait()
        assert full.equal(torch.cat(shards)), ("all_gather", count)

        aliased = torch.zeros(size * count, dtype=dtype)
        own = aliased.view(size, -1)[rank]
        own.copy_(shards[rank])
        wires.all_gather(aliased, own).wait()
        assert aliased.equal(torch.cat(shards)), ("all_gather in place", count)

        wholes = [values_of(r, size * count, dtype, seed=1) for r in range(size)]
        summed = rank_sum(wholes).view(size, -1)[rank]
        given, into = wholes[rank].clone(), torch.empty(count, dtype=dtype)
        wires.reduce_scatter(given, into).wait()
        assert into.equal(summed), ("reduce_scatter", count)
        assert given.equal(wholes[rank]), "what is given stays as it was"

        wires.reduce_scatter(given, given.view(size, -1)[rank]).wait()
        assert given.view(size, -1)[rank].equal(summed), ("reduce_scatter in place", count)

        whole = wholes[rank].clone()
        wires.all_reduce(whole).wait()
        assert whole.equal(rank_sum(wholes)), ("all_reduce", count)


@on_both_backends
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_values(ranks: Pool, dtype: str) -> None:
    ranks.run(gather_and_scatter, dtype)


def reduce_ahead() -> None:
    """Rank 0 gets the sum of what all have begun two of, before any peer waits for one."""
    wires = group("reduce")
    size, rank = wires.size, wires.index
    wholes = [[values_of(r, size * 1000, seed=seed) for r in range(size)] for seed in range(3)]
    given = [wires.empty(size * 1000, torch.float32).copy_(whole[rank]) for whole in wholes]
    begun = [wires.all_reduce(given[0])]
    dist.barrier()  # All have come to the first one; whoever begins another sums its slice of it.
    begun.append(wires.all_reduce(given[1]))
    if rank == 0:
        begun[0].wait()
        assert given[0].equal(rank_sum(wholes[0]))
    dist.barrier()
    begun.append(wires.all_reduce(given[2]))
    for work in reversed(begun):  # In whatever order.
        work.wait()
    for sums, whole in zip(given, wholes, strict=True):
        assert sums.equal(rank_sum(whole))
    wires.wait_until_all_read()


def test_a_rank_that_is_ahead_does_not_wait_for_peers_that_have_begun_more(pool_of: PoolOf) -> None:
    pool_of(2).run(reduce_ahead)
    pool_of(4).run(reduce_ahead)


def sum_narrow_terms(dtype_name: str) -> dict[str, int]:
    """What is summed over the ranks without a flat: in float32, rounded once, at the bytes of the narrow dtype. And the
    exchange of slices that stands in for NCCL's reduce-scatter, over gloo."""
    dtype, wires = getattr(torch, dtype_name), group()
    size, rank = wires.size, wires.index
    for count in (1, 7, 1000):
        terms = [values_of(r, count, dtype) for r in range(size)]
        assert wires.sum(terms[rank].view(1, -1)).equal(rank_sum(terms).view(1, -1)), count
        wholes = [values_of(r, size * count, dtype, seed=1) for r in range(size)]
        own = rank_sum(wholes).view(size, -1)[rank]
        assert wires.scatter_sum(wholes[rank], 0).equal(own), count
        if size > 1:
            exchanging = Exchanging(wires._wires, size, rank, wires.device)
            into, wide = torch.empty(count, dtype=dtype), torch.ones(count)
            exchanging.reduce_scatter(wholes[rank], into, accumulate=False)()
            assert into.equal(own), count
            exchanging.reduce_scatter(wholes[rank], wide, accumulate=True)()
            exact = 1 + sum(whole.view(size, -1)[rank].float() for whole in wholes)
            torch.testing.assert_close(wide, exact, rtol=1e-6 if size > 2 else 2**-7, atol=1e-6 if size > 2 else 2**-7)
    return dict(wires.traffic.take()[0])


@on_both_backends
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_terms_are_summed_wide_at_their_own_bytes(ranks: Pool, dtype: str) -> None:
    n = ranks.size
    sent = {"all_reduce": sum(2 * (n - 1) * 2 * count // n for count in (1, 7, 1000)), "reduce_scatter": (n - 1) * 2016}
    assert ranks.run(sum_narrow_terms, dtype) == [sent if n > 1 else {}] * n


def accumulate_wider() -> None:
    """Adding to what is there, in a wider dtype: nothing is rounded to the narrow one but the terms themselves."""
    wires = group()
    into = torch.full((6,), 0.125)
    for seed in range(3):
        wholes = [values_of(r, wires.size * 6, torch.bfloat16, seed) for r in range(wires.size)]
        before = into.clone()
        wires.reduce_scatter(wholes[wires.index], into, accumulate=True).wait()
        mine = [whole.view(wires.size, -1)[wires.index] for whole in wholes]
        exact = before + sum(term.float() for term in mine)
        # One rounding of the sum to bfloat16 may happen on the way, where two terms are added in it.
        torch.testing.assert_close(into, exact, rtol=2**-7, atol=2**-7)
        assert into.dtype == torch.float32
        assert not into.equal(before)


@on_both_backends
def test_accumulation_in_a_wider_dtype(ranks: Pool) -> None:
    ranks.run(accumulate_wider)


def scalars_and_objects() -> None:
    wires = group()
    size, rank = wires.size, wires.index
    given = torch.tensor([rank + 1.0, 2.0**-40 * rank], dtype=torch.float64)
    total = wires.sum_scalars(given)
    assert total.tolist() == [size * (size + 1) / 2, 2.0**-40 * size * (size - 1) / 2]
    assert given[0] == rank + 1, "a new tensor"

    for source in range(size):
        tensor = torch.full((3,), float(rank))
        wires.broadcast(tensor, source)
        assert tensor.eq(source).all()
    value = {"rank": rank, "text": "naïve – 8 × 2", "nothing": None, "list": [1, [2.5]]}
    assert wires.share(value, size - 1) == {**value, "rank": size - 1}
    assert wires.collect([rank, "x" * rank]) == [[r, "x" * r] for r in range(size)]
    wires.barrier()


@on_both_backends
def test_scalars_broadcasts_and_objects(ranks: Pool) -> None:
    ranks.run(scalars_and_objects)


# ---- order -----------------------------------------------------------------------------------------------------------


def overlap() -> None:
    """Many gathers under way at once and waited for in another order, beside reductions on another channel."""
    gathers, reductions = group(), group("reduce")
    size, rank = gathers.size, gathers.index
    full = [torch.zeros(size * 9) for _ in range(6)]
    pending = [gathers.all_gather(tensor, values_of(rank, 9, seed=i)) for i, tensor in enumerate(full)]
    into = [torch.zeros(4) for _ in range(3)]
    reduced = [reductions.reduce_scatter(values_of(rank, size * 4, seed=i), part) for i, part in enumerate(into)]
    for work in [*reversed(pending), *reduced[1:], reduced[0]]:
        work.wait()
    for i, tensor in enumerate(full):
        assert tensor.equal(torch.cat([values_of(r, 9, seed=i) for r in range(size)])), i
    for i, part in enumerate(into):
        expected = rank_sum([values_of(r, size * 4, seed=i) for r in range(size)]).view(size, -1)[rank]
        assert part.equal(expected), i


@on_both_backends
def test_collectives_overlap(ranks: Pool) -> None:
    ranks.run(overlap)


def channels_in_different_orders() -> None:
    """Rank 0 gathers before it reduces, the others after: through two channels neither waits for the other."""
    gathers, reductions = group(), group("reduce")
    size, rank = gathers.size, gathers.index
    full, into = torch.zeros(size * 3), torch.zeros(3)
    whole = values_of(rank, size * 3, seed=1)
    starts = [
        lambda: gathers.all_gather(full, values_of(rank, 3)),
        lambda: reductions.reduce_scatter(whole, into),
    ]
    for work in [start() for start in (starts if rank == 0 else reversed(starts))]:
        work.wait()
    assert full.equal(torch.cat([values_of(r, 3) for r in range(size)]))
    assert into.equal(rank_sum([values_of(r, size * 3, seed=1) for r in range(size)]).view(size, -1)[rank])


@on_both_backends
def test_two_channels_do_not_wait_for_each_other(ranks: Pool) -> None:
    ranks.run(channels_in_different_orders, timeout=20)


def offered_shards() -> None:
    """Shards that were offered are gathered at each rank's own time; what is not gathered is withdrawn for good."""
    wires = group()
    size, rank = wires.size, wires.index
    for turn in range(3):
        shards = [values_of(rank, 8, seed=10 * turn + i) for i in range(4)]
        full = [torch.zeros(size * 8) for _ in shards]
        wires.offer(shards)
        if turn == 1:
            # A pass that is broken off; every rank withdraws, and the next pass is not confused by it.
            wires.barrier()
            wires.withdraw()
            continue
        order = list(range(4)) if rank % 2 == 0 else [3, 1, 0, 2]
        for i in order:
            wires.all_gather(full[i], shards[i]).wait()
        wires.wait_until_all_read()
        for i, tensor in enumerate(full):
            assert tensor.equal(torch.cat([values_of(r, 8, seed=10 * turn + i) for r in range(size)])), (turn, i)


@on_both_backends
def test_offered_shards_are_gathered_in_any_order(ranks: Pool) -> None:
    ranks.run(offered_shards, timeout=20)


# ---- counting --------------------------------------------------------------------------------------------------------


def count_traffic() -> tuple[dict[str, int], dict[str, float], int, dict[str, int]]:
    traffic = CommStats()
    wires = Group(list(range(dist.get_world_size())), traffic, torch.device("cpu"))
    size = wires.size
    traffic.phase = "backward"
    wires.all_gather(torch.zeros(size * 10), torch.zeros(10)).wait()
    wires.reduce_scatter(torch.zeros(size * 10, dtype=torch.bfloat16), torch.zeros(10)).wait()
    counted = traffic.take()
    peak = traffic.buffers.take_peak()
    return (
        counted.sent_bytes,
        counted.peer_seconds,
        peak,
        {"left": traffic.buffers.live_bytes, "again": sum(traffic.take()[0].values())},
    )


@on_both_backends
def test_bytes_waits_and_buffers_are_counted(ranks: Pool) -> None:
    peers = ranks.size - 1
    for sent, waited, peak, rest in ranks.run(count_traffic):
        assert {name: count for name, count in sent.items() if count} == (
            {"all_gather": peers * 40, "reduce_scatter": peers * 20} if peers else {}
        )
        received = peers * 20 if ranks.backend == "gloo" else 0
        assert peak == received, "the received terms of the reduction; shared memory is read in place"
        assert rest == {"left": 0, "again": 0}
        assert all(seconds >= 0 for seconds in waited.values())
        assert set(waited) <= {"backward"}


# ---- joining, leaving, losing ----------------------------------------------------------------------------------------


def lose_a_peer() -> str:
    """The last rank leaves; the others, who wait for it, are told so. Nothing of the old world is used afterwards."""
    wires = group()
    wires.barrier()
    try:
        if wires.index == wires.size - 1:
            return "left"
        wires.all_gather(torch.zeros(wires.size * 4), torch.zeros(4)).wait()
    except PeerLost as error:
        return str(error)
    finally:
        wires.disconnect()
        leave()
    return "nothing noticed"


@pytest.mark.parametrize("ranks", [2, 4, *GLOO], indirect=True, ids=["dp2", "dp4", "dp2-gloo", "dp4-gloo"])
def test_lost_peer_is_named_at_once(ranks: Pool) -> None:
    said = ranks.run(lose_a_peer, timeout=20)
    ranks.new_group()
    last = ranks.size - 1
    assert said[last] == "left"
    # gloo does not tell which one.
    whom = "a peer that left" if ranks.backend == "gloo" else f"rank {last} in a collective: rank {last} left"
    for rank, message in enumerate(said[:last]):
        assert message.startswith(f"rank {rank} waited for {whom}")


def fail_alone(kind: str) -> tuple[str, str, int]:
    """An error of this rank inside a collective: it stays what it is. What it was, and how its cause was told."""
    wires = group()
    error = {"memory": torch.OutOfMemoryError, "arena": MemoryError, "other": RuntimeError, "gloo": RuntimeError}[kind]
    text = "[pair.cc:5] Connection closed by peer [::1]:5" if kind == "gloo" else "DefaultCPUAllocator: no"
    with mock.patch.object(dist, "all_reduce", side_effect=error(text)):
        try:
            wires.sum(torch.zeros(4))
        except Exception as raised:
            return type(raised).__name__, str(raised), id(raised.__cause__) if raised.__cause__ else 0
    return "", "", 0


@on_both_backends
def test_errors_that_are_no_peers_fault_stay_what_they_are(ranks: Pool) -> None:
    if ranks.size == 1:
        return  # It calls nothing.
    for kind, name in (("memory", "OutOfMemoryError"), ("arena", "MemoryError"), ("other", "RuntimeError")):
        assert ranks.run(fail_alone, kind) == [(name, "DefaultCPUAllocator: no", 0)] * ranks.size
    for rank, (name, text, cause) in enumerate(ranks.run(fail_alone, "gloo")):
        assert name == "PeerLost"
        assert text == f"rank {rank} waited for a peer that left (Connection closed by peer [::1]:5)"
        assert cause, "the backend's own error is kept"


def join_by_rendezvous(folder: Path, times: int) -> list[tuple[int, int, float]]:
    """Leave the pool's group and join, leave and join again through a folder, as engines do."""
    rank, size = dist.get_rank(), dist.get_world_size()
    leave()
    seen = []
    variables = {"SPEEDLAB_RENDEZVOUS": str(folder), "RANK": str(rank), "WORLD_SIZE": str(size)}
    with mock.patch.dict(os.environ, variables):
        for _ in range(times):
            world = join(timeout_seconds=20)
            assert join() == world, "joined already"
            wires = group()
            total = wires.sum_scalars(torch.tensor([rank + 1.0])).item()
            seen.append((world.rank, world.size, total))
            del wires
            leave()
    leave()  # Does nothing when there is no world.
    return seen


def test_engines_join_through_a_folder_again_and_again(ranks: Pool, tmp_path: Path) -> None:
    total = sum(range(1, ranks.size + 1))
    results = ranks.run(join_by_rendezvous, tmp_path, 3, timeout=40)
    ranks.new_group()
    assert results == [[(rank, ranks.size, total)] * 3 for rank in range(ranks.size)]


def join_alone() -> tuple[int, int, float]:
    """Without any variables a process is a world of its own."""
    leave()
    world = join()
    total = Group([0], CommStats(), world.device).sum_scalars(torch.tensor([3.0])).item()
    leave()
    return world.rank, world.size, total


def test_process_alone_is_a_world(pool_of: PoolOf) -> None:
    pool = pool_of(1)
    assert pool.run(join_alone) == [(0, 1, 3.0)]
    pool.new_group()


def join_as_torchrun(port: int) -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    leave()
    variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with mock.patch.dict(os.environ, variables):
        world = join(timeout_seconds=20)
    group().barrier()
    leave()
    return world.rank, world.size


def test_ranks_join_under_torchrun(two: Pool) -> None:
    results = two.run(join_as_torchrun, free_port(), timeout=40)
    two.new_group()
    assert results == [(0, 2), (1, 2)]


def unpickled(value: Any) -> str:
    """Values that JSON cannot hold are refused on the sender, before anything is sent."""
    wires = group()
    try:
        wires.share(value, wires.index)
    except TypeError as error:
        return str(error)
    return "sent"


def test_only_plain_values_are_shared(two: Pool) -> None:
    for message in two.run(unpickled, {1, 2}):
        assert "not JSON serializable" in message
