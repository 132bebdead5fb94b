"""Groups whose ranks are on several hosts: shared memory within a host, gloo between, beside plain gloo.

Ranks of one machine take each other for ranks of other hosts, because SPEEDLAB_HOST differs ("aabb": two hosts of two).
"""

from __future__ import annotations

import datetime
import functools
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from grids import thinned
from torch import Tensor

from ranks.conftest import PoolOf
from ranks.loops import Case, adamw, train_cases
from ranks.pool import Pool
from ranks.test_collectives import lose_a_peer, scalars_and_objects
from ranks.test_parity import FLOAT32, STAGES
from ranks.test_shared_backend import (
    copy_everywhere,
    fall_through,
    gather_whole,
    mean,
    new_group,
    place,
    scatter_sum,
    split_unevenly,
    total,
    values,
)
from ranks.test_shared_torch import ddp, fsdp, hybrid, pipeline, tensor_parallel
from speedlab.comm import CommStats, Group, PeerLost
from speedlab.comm.shared import SharedGroup, SpanningGroup
from speedlab.comm.transports.base import Transport

HOSTS = ["aabb", "abab", "aaab", "abbc"]
"""Two hosts of two ranks, in turn too; hosts of different size; three hosts."""

SIZES = [0, 1, 7, 4096, 4097, 300_001]


@pytest.fixture(params=HOSTS)
def spanning(request: pytest.FixtureRequest, pool_of: PoolOf) -> Pool:
    return pool_of(4, "shared", request.param)


@pytest.fixture
def twice_two(pool_of: PoolOf) -> Pool:
    return pool_of(4, "shared", "aabb")


# ---- collectives -----------------------------------------------------------------------------------------------------


def kinds(hosts: str) -> None:
    """What groups of some of the ranks are: of one host, of several, of hosts with one rank each."""
    assert isinstance(dist.group.WORLD, SpanningGroup)
    for members in ([0, 1], [0, 1, 2], [1, 2], [2, 3], [0, 3], [3]):
        with new_group(members) as group:
            if dist.get_rank() not in members:
                continue
            number = len({hosts[rank] for rank in members})
            kind = SharedGroup if number == 1 else SpanningGroup if number < len(members) else dist.ProcessGroup
            assert type(group) is kind, members
            tensor = torch.tensor([float(dist.get_rank())])
            dist.all_reduce(tensor, group=group)
            assert tensor.item() == sum(members)


def test_groups_are_chosen_by_their_hosts(spanning: Pool) -> None:
    spanning.run(kinds, spanning.hosts)


def by_host(terms: list[Tensor], hosts: str, pair: Any) -> Tensor:
    """Reduced within each host in rank order, then over hosts."""
    sums = [pair([t for t, host in zip(terms, hosts, strict=True) if host == name]) for name in dict.fromkeys(hosts)]
    return pair(sums)


def reduce_over_hosts(dtype_name: str, hosts: str) -> list[Tensor]:
    """To the bit what the order of sums gives; returned for a comparison with gloo."""
    dtype = getattr(torch, dtype_name)
    rank, ranks = place()
    seen = []
    for numel in SIZES:
        terms = [values(r, numel, dtype) for r in ranks]
        wholes = [values(r, 4 * numel, dtype, seed=1) for r in ranks]
        mine = [whole.view(4, -1)[rank] for whole in wholes]
        pairs: dict[str, Any] = {
            "SUM": total,
            "MIN": lambda given: functools.reduce(torch.minimum, given),
            "MAX": lambda given: functools.reduce(torch.maximum, given),
            "PRODUCT": lambda given: functools.reduce(torch.mul, given),
        }
        for name, pair in pairs.items():
            op = getattr(dist.ReduceOp, name)
            tensor, out = terms[rank].clone(), torch.empty(numel, dtype=dtype)
            dist.all_reduce(tensor, op)
            scatter_sum(out, wholes[rank].clone(), op)
            if hosts:
                assert tensor.equal(by_host(terms, hosts, pair)), ("all_reduce", name, numel)
                assert out.equal(by_host(mine, hosts, pair)), ("reduce_scatter", name, numel)
            seen += [tensor, out]
        if hosts:
            tensor, out = terms[rank].clone(), torch.empty(numel, dtype=dtype)
            dist.all_reduce(tensor, dist.ReduceOp.AVG)
            scatter_sum(out, wholes[rank].clone(), dist.ReduceOp.AVG)
            torch.testing.assert_close(tensor, mean(terms))
            torch.testing.assert_close(out, mean(mine))
    return seen


DTYPES = ["float32", "bfloat16", "float16", "float64", "int64", "uint8"]


def on_half_of_the_hosts(dtypes: list[str]) -> pytest.MarkDecorator:
    """Each dtype on two of `HOSTS`, each of these with half of the dtypes; the rest is nightly."""
    grid = itertools.product(HOSTS, dtypes)
    points = thinned(grid, lambda hosts, dtype: (HOSTS.index(hosts) + dtypes.index(dtype)) % 2 == 0)
    return pytest.mark.parametrize(("spanning", "dtype"), points, indirect=["spanning"])


@on_half_of_the_hosts(DTYPES)
def test_reductions(spanning: Pool, pool_of: PoolOf, dtype: str) -> None:
    by_rank = spanning.run(reduce_over_hosts, dtype, spanning.hosts)
    for rank in range(1, 4):
        for a, b in zip(by_rank[rank][::2], by_rank[0][::2], strict=True):
            assert a.equal(b), "all ranks have the same bits of an all-reduce"
    if dtype in ("float32", "int64") and spanning.hosts == "aabb":
        for ours, theirs in zip(by_rank, pool_of(4, "gloo").run(reduce_over_hosts, dtype, ""), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@on_half_of_the_hosts(["float32", "bfloat16", "bool"])
def test_copies(spanning: Pool, dtype: str) -> None:
    spanning.run(copy_everywhere, dtype)


def broadcast_from_everybody() -> None:
    rank, ranks = place()
    for source in ranks:
        for numel in SIZES:
            tensor = values(rank, numel, torch.bfloat16)
            dist.broadcast(tensor, source)
            assert tensor.equal(values(source, numel, torch.bfloat16)), (source, numel)


def test_broadcast_from_every_rank(spanning: Pool) -> None:
    spanning.run(broadcast_from_everybody)


def overlap_over_hosts() -> None:
    """Collectives under way at once, waited for in another order; several tensors in one call; strided memory. Small
    whole numbers, whose sums are exact in any order."""
    rank, ranks = place()
    n, terms = len(ranks), [torch.arange(50_000.0) % 64 + r for r in ranks]
    tensors = [terms[rank].clone() for _ in range(4)]
    works: list[Any] = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    full, slice_sum, strided = torch.empty(n * 9), torch.empty(10), torch.zeros(500, 2)
    works.append(gather_whole(full, terms[rank][:9], async_op=True))
    works.append(scatter_sum(slice_sum, terms[rank][: n * 10], async_op=True))
    works.append(dist.barrier(async_op=True))
    strided[:, 1] = terms[rank][:500]
    dist.all_reduce(strided[:, 1])
    for work in [*works[4:], *reversed(works[:4])]:
        work.wait()
    for tensor in tensors:
        assert tensor.equal(sum(terms))
    assert full.equal(torch.cat([term[:9] for term in terms]))
    assert slice_sum.equal(sum(terms)[rank * 10 : (rank + 1) * 10])
    assert strided[:, 1].equal(sum(terms)[:500])
    assert not strided[:, 0].any()
    several = [terms[rank][:k].clone() for k in (0, 3, 5000)]
    world: Any = dist.group.WORLD
    world.allreduce_coalesced(several, dist.AllreduceCoalescedOptions()).wait()
    for tensor in several:
        assert tensor.equal(sum(terms)[: tensor.numel()])


def test_collectives_overlap(spanning: Pool) -> None:
    spanning.run(overlap_over_hosts)


def test_what_goes_to_gloo(spanning: Pool) -> None:
    spanning.run(fall_through)
    spanning.run(split_unevenly, 1000, lists=False)  # Of lists gloo takes equal parts only.


def many_through_gloo() -> None:
    """With the GIL kept on the way to gloo, one in a hundred of these never came back."""
    rank, ranks = place()
    for k in range(100):
        given, out = torch.full((40_000,), float(rank + k)), torch.empty(40_000)
        dist.all_to_all_single(out, given)
        assert out.view(4, -1)[:, 0].tolist() == [r + k for r in ranks]
        dist.reduce(given, dst=0)


def test_many_that_go_to_gloo(twice_two: Pool) -> None:
    twice_two.run(many_through_gloo)


def exchange_in_pairs() -> None:
    """Messages within a host and between hosts."""
    rank = dist.get_rank()
    for distance in (1, 2):
        other = rank ^ distance
        received = torch.zeros(1000)
        works = [dist.isend(values(rank, 1000, torch.float32), other, tag=distance)]
        works.append(dist.irecv(received, other, tag=distance))
        for work in works:
            assert work is not None
            work.wait()
        assert received.equal(values(other, 1000, torch.float32))


def test_messages(twice_two: Pool) -> None:
    twice_two.run(exchange_in_pairs)


# ---- lost ranks ------------------------------------------------------------------------------------------------------


def lose_one(lost: int, seconds: float | None, known: bool = False) -> str:
    """Rank `lost` leaves (or, with a timeout, does not come); the others are told, on its own host and elsewhere.
    `known`: it has left before they begin."""
    options = {} if seconds is None else {"timeout": datetime.timedelta(seconds=seconds)}
    said = ""
    with new_group(range(4), **options) as group:
        dist.barrier(group)
        if dist.get_rank() == lost:
            if seconds is None:
                group.leave()
            if known:
                dist.barrier()
        else:
            if known:
                dist.barrier()
            try:
                dist.all_reduce(torch.zeros(10), group=group)
            except PeerLost as error:
                said = str(error)
        dist.barrier()
    return said


@pytest.mark.parametrize(
    ("lost", "seconds"),
    # Of those that never come, which takes the seconds, one that speaks for its host and one that does not.
    thinned(itertools.product(range(4), [None, 1.0]), lambda lost, seconds: seconds is None or lost in (0, 3)),
)
def test_lost_rank(twice_two: Pool, lost: int, seconds: float | None) -> None:
    results = twice_two.run(lose_one, lost, seconds, timeout=40)
    partner = lost ^ 1
    for rank, message in enumerate(results):
        if rank != lost:
            assert message.startswith(f"rank {rank} waited for rank "), message
    assert results[partner].startswith(f"rank {partner} waited for rank {lost} in a collective: rank {lost} ")


def test_rank_that_left_before_the_others_begin(twice_two: Pool) -> None:
    """gloo then raises where something is sent to it, not where that is waited for."""
    results = twice_two.run(lose_one, 2, None, True, timeout=40)
    for rank in (0, 1, 3):
        assert results[rank].startswith(f"rank {rank} waited for rank "), results[rank]


def test_world_that_loses_a_rank(twice_two: Pool) -> None:
    said = twice_two.run(lose_a_peer, timeout=20)
    twice_two.new_group()
    assert said[3] == "left"
    for rank, message in enumerate(said[:3]):
        assert message.startswith(f"rank {rank} waited for rank "), message


# ---- the engine, and torch's own parallel code -----------------------------------------------------------------------


def transport() -> str:
    wires = Group(list(range(4)), CommStats(), torch.device("cpu"))
    return type(wires.transport_of(wires.device)).__name__


def test_group_uses_the_collectives(twice_two: Pool) -> None:
    assert twice_two.run(transport) == [Transport.__name__] * 4
    twice_two.run(scalars_and_objects)
    twice_two.run(overlap_over_hosts)


@pytest.mark.parametrize("stage", STAGES)
def test_engine(check: Any, twice_two: Pool, stage: int) -> None:
    case = Case(stage=stage, optimizer=adamw)
    check(twice_two, [case, replace(case, accumulation=2, clip_norm=0.3, checkpointing="block")], FLOAT32)


@on_half_of_the_hosts(["float32", "bfloat16"])
def test_stages_give_the_same_bits(spanning: Pool, dtype: str) -> None:
    """Sums are taken in one order at every stage, here too."""
    cases = [Case(stage=stage, dtype=dtype, optimizer=adamw, clip_norm=0.3, steps=4) for stage in STAGES]
    for paths in spanning.run(train_cases, cases):
        for case, path in zip(cases, paths, strict=True):
            assert path.losses == paths[0].losses, case
            assert not [n for n, p in path.parameters.items() if not p.equal(paths[0].parameters[n])], case


@pytest.mark.parametrize(
    ("function", "arguments"),
    [(ddp, (Case(steps=5),)), (fsdp, (True, "float32")), (hybrid, ()), (tensor_parallel, ()), (pipeline, (4,))],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_torch(pool_of: PoolOf, twice_two: Pool, function: Any, arguments: tuple[Any, ...]) -> None:
    ours, theirs = twice_two.run(function, *arguments), pool_of(4, "gloo").run(function, *arguments)
    for a, b in zip(ours, theirs, strict=True):
        for name, value in a.items():
            torch.testing.assert_close(value, b[name], rtol=1e-6, atol=1e-6)
