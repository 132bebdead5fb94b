"""speedlab.comm.shared.mapped_shards: what ranks of one host gather without copying it is what its owners have, and
theirs."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from ranks.loops import Case as LoopCase
from ranks.loops import engine_for
from ranks.pool import Pool
from ranks.test_collectives import group, values_of
from speedlab.comm import PeerLost
from speedlab.comm.process_groups import ProcessGroups
from speedlab.comm.shared import mapped_shards as module
from speedlab.comm.shared import sync_page as meeting_module
from speedlab.comm.shared.mapped_shards import MappedShards
from speedlab.comm.shared.shared_tensors import Arena, PeerMemory

SIZES = [1, 5, 1000, 1024, 1500, 5000, 40_000]
"""Elements of a shard: of no page, of parts of pages, and of whole ones."""


class Case:
    """A shard of each rank, and the whole."""

    def __init__(self, count: int, dtype: torch.dtype = torch.float32) -> None:
        self.group = group()
        self.count, self.dtype = count, dtype
        self.shard = self.group.empty(count, dtype, place=self.group.index * count)
        self.joined = MappedShards(self.group.size * count, dtype, self.group.size)
        self.write(0)

    def write(self, seed: int) -> None:
        self.shard.copy_(values_of(self.group.index, self.count, self.dtype, seed=seed))

    def expected(self, seed: int) -> Tensor:
        return torch.cat([values_of(rank, self.count, self.dtype, seed=seed) for rank in range(self.group.size)])

    def materialize(self) -> Tensor:
        self.joined.materialize()
        self.group.join(self.joined, self.shard).wait()
        return self.joined.tensor

    def wait_to_write(self) -> None:
        self.group.wait_until_all_read()
        self.group.wait_until_let_go([self.shard])

    @property
    def mapped(self) -> list[bool]:
        return [piece.mapped is not None for piece in self.joined._pieces]


def gather_twice(dtype_name: str) -> None:
    for count in SIZES:
        case = Case(count, getattr(torch, dtype_name))
        for seed in range(2):
            case.write(seed)
            assert case.materialize().equal(case.expected(seed)), (count, seed)
            case.joined.free()
            case.wait_to_write()
        pages = (count - 1) * case.dtype.itemsize // 4096 - 1  # That surely are of one shard alone.
        assert pages < 1 or all(case.mapped), count


@pytest.mark.parametrize("ranks", [2, 3, 4], indirect=True)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_values_come_and_change(ranks: Pool, dtype: str) -> None:
    ranks.run(gather_twice, dtype)


def nothing_is_copied() -> None:
    """What an owner writes is seen by whoever has the whole: the same memory, but for the ends of the shards."""
    case = Case(40_000)
    whole = case.materialize().view(case.group.size, -1)
    dist.barrier()
    case.shard[20_000] = 77 + case.group.index
    dist.barrier()
    assert whole[:, 20_000].tolist() == [77 + rank for rank in range(case.group.size)]
    dist.barrier()
    case.joined.free()


def test_nothing_is_copied(two: Pool) -> None:
    two.run(nothing_is_copied)


def what_is_written_here_stays_here(pagemap: bool) -> None:
    with mock.patch.object(module, "_pagemap", module._pagemap if pagemap else lambda: None):
        case = Case(40_000)
        whole = case.materialize()
        whole.mul_(3)  # All ranks do, each with its own.
        dist.barrier()
        assert whole.equal(3 * case.expected(0))
        assert case.shard.equal(values_of(case.group.index, 40_000))
        dist.barrier()
        case.joined.free()
        assert case.materialize().equal(case.expected(0))
        case.joined.free()
        whole[20_000] = 5.0  # Through a view that somebody kept.
        case.wait_to_write()
        case.write(1)
        assert case.materialize().equal(case.expected(1))
        assert all(case.mapped)
        case.joined.free()


@pytest.mark.parametrize("pagemap", [True, False], ids=["told", "untold"])
def test_what_is_written_into_the_whole_is_nobody_elses_and_gone_when_it_comes_again(two: Pool, pagemap: bool) -> None:
    two.run(what_is_written_here_stays_here, pagemap)


def pages_cannot_be_dropped() -> None:
    with mock.patch.object(module, "drop_copies", return_value=False):
        what_is_written_here_stays_here(True)


def test_where_memory_is_locked_it_is_mapped_again(two: Pool) -> None:
    two.run(pages_cannot_be_dropped)


def owners_wait() -> list[str]:
    """Rank 1 keeps what rank 0 wants to write; then it lets go of it in several ways."""
    seen = []
    let_go: dict[str, Callable[[Case], None]] = {
        "go": lambda case: case.joined.free(),
        "drop": drop,
        "fork, then go": lambda case: (in_a_child(drop, case), still_there(case), case.joined.free()),
        "withdraw, then go": lambda case: (case.group.withdraw(), case.joined.free()),
    }
    for name, end in let_go.items():
        case = Case(3000)
        case.materialize()
        case.group.all_gather(torch.empty(6000), case.shard).wait()  # As for a checkpoint; it comes and goes.
        case.group.wait_until_all_read()
        if case.group.index == 0:
            case.joined.free()
        dist.barrier()
        if case.group.index == 0:
            meeting: Any = case.group.transport_of(case.shard.device)
            meeting._meeting.timeout_seconds = 0.05
            with pytest.raises(PeerLost, match="rank 1 did not come"):
                case.group.wait_until_let_go([case.shard])
            meeting._meeting.timeout_seconds = 30
        else:
            case.group.wait_until_let_go([case.shard])  # Nobody else has this one.
        dist.barrier()
        if case.group.index == 1:
            end(case)
        case.group.wait_until_let_go([case.shard])
        dist.barrier()
        seen.append(name)
    return seen


def in_a_child(work: Callable[[Case], object], case: Case) -> None:
    child = os.fork()
    if child == 0:
        work(case)
        os._exit(0)
    os.waitpid(child, 0)


def still_there(case: Case) -> None:
    transport: Any = case.group.transport_of(case.shard.device)
    assert min(transport._meeting._words[case.group.index][transport._meeting._held_at :][:1000]) < 0


def drop(case: Case) -> None:
    del case.joined
    gc.collect()


def test_an_owner_waits_until_peers_have_let_go(two: Pool) -> None:
    assert two.run(owners_wait, timeout=60) == [["go", "drop", "fork, then go", "withdraw, then go"]] * 2


def memory_stays(count: int) -> None:
    """An owner gives up its shard while a peer has the whole."""
    case = Case(count)
    whole = case.materialize() if case.group.index == 1 else None
    if case.group.index == 0:
        case.materialize()
        case.joined.free()
        case.group.wait_until_all_read()
        case.shard = torch.empty(0)
        case.group.empty(count, torch.float32).fill_(13)
    else:
        case.group.wait_until_all_read()
    dist.barrier()
    if whole is not None:
        assert whole.equal(case.expected(0))
        case.joined.free()
    dist.barrier()


def test_a_shard_outlives_its_owners_use(two: Pool) -> None:
    two.run(memory_stays, 40_000)


def where_nothing_can_be_mapped() -> None:
    def refuse(self: object, *place: int) -> None:
        raise MemoryError("Cannot allocate memory")

    with mock.patch.object(PeerMemory, "map_at", refuse), mock.patch.object(Arena, "map_at", refuse):
        gather_twice_unmapped()


def gather_twice_unmapped() -> None:
    case = Case(5000)
    for seed in range(2):
        case.write(seed)
        assert case.materialize().equal(case.expected(seed))
        case.joined.free()
        case.wait_to_write()
    assert not any(case.mapped)


def test_without_mappings_it_is_copied(two: Pool) -> None:
    two.run(where_nothing_can_be_mapped)


def the_ring_is_full() -> None:
    """The place of an offer is still taken by one of long before."""
    case = Case(5000)
    transport: Any = case.group.transport_of(case.shard.device)
    meeting = transport._meeting
    case.materialize()
    entry = meeting._held_at + (meeting.offered - 1) % meeting_module._OFFERS
    assert meeting._words[case.group.index][entry] == -meeting.offered
    next_entry = meeting._held_at + meeting.offered % meeting_module._OFFERS
    another = meeting.offered + meeting_module._OFFERS
    meeting._words[case.group.index][next_entry] = -1 - another
    other = MappedShards(10_000, torch.float32, 2)
    case.group.join(other, case.shard).wait()
    assert other.tensor.equal(case.expected(0))
    other.free()
    assert meeting._words[case.group.index][next_entry] == -1 - another  # Nobody let go of that.
    meeting._words[case.group.index][next_entry] = 0
    case.joined.free()
    case.wait_to_write()


def test_what_cannot_be_held_is_copied(two: Pool) -> None:
    two.run(the_ring_is_full, timeout=60)


def an_owner_without_mappings_of_its_own() -> None:
    """Rank 0 was refused what the others have: theirs counts."""
    refused = mock.patch.object(MappedShards, "fits", return_value=dist.get_rank() != 0)
    case = LoopCase(stage=3)
    with refused, engine_for(case) as engine:
        joined = [isinstance(flat._coming, MappedShards) for flat in engine.zeros[0].flats]
        assert set(joined) == {dist.get_rank() != 0}
        loss = case.loss(engine, case.batch(0, dist.get_rank()))  # The root stays.
        dist.barrier()
        gathers = engine.zeros[0].gathers
        if dist.get_rank() == 0:
            meeting: Any = gathers._group.transport_of(torch.device("cpu"))
            meeting._meeting.timeout_seconds = 0.05
            with pytest.raises(PeerLost, match="rank 1 did not come"):
                gathers.before_change()
            meeting._meeting.timeout_seconds = 30
        dist.barrier()
        gathers.before_change()
        del loss


def test_an_owner_that_copies_waits_for_peers_that_do_not(two: Pool) -> None:
    two.run(an_owner_without_mappings_of_its_own, timeout=60)


def test_mappings_are_counted() -> None:
    before = MappedShards._all_mappings
    with mock.patch.object(module, "_most_mappings", return_value=2 * (before + 11)):
        assert MappedShards.fits(2)
        made = [MappedShards(10_000, torch.float32, 2), MappedShards(10_000, torch.float32, 2)]
        assert not MappedShards.fits(2)
        made.pop()
        assert MappedShards.fits(2)
        with mock.patch.object(module, "_pages_follow", return_value=False):
            assert not MappedShards.fits(2)


def test_private_pages_follow_their_file_here() -> None:
    assert module._pages_follow()
    with mock.patch.object(module, "map_over"):
        assert not module._pages_follow.__wrapped__()


def over_another_transport() -> None:
    """A tensor that was mapped before the ranks met elsewhere."""
    case = Case(5000)
    case.materialize()
    case.joined.free()
    case.wait_to_write()
    case.write(1)
    gloo: Any = dist.new_group(backend="gloo")
    other = group("other")
    other._wires, other._transports, other._links = ProcessGroups(gloo), {}, {}
    assert other.joined(1 << 20, torch.float32) is None
    assert case.group.joined(1 << 20, torch.float32) is not None
    case.joined.materialize()
    other.join(case.joined, case.shard).wait()
    assert case.joined.tensor.equal(case.expected(1))
    assert not any(case.mapped)
    case.joined.free()
    assert case.materialize().equal(case.expected(1))
    assert all(case.mapped)
    case.joined.free()


def test_another_transport_fills_it(two: Pool) -> None:
    two.run(over_another_transport)


def descriptors() -> int:
    before = len(os.listdir("/proc/self/fd"))
    cases = [Case(5000) for _ in range(20)]
    for case in cases:
        case.materialize()
    more = len(os.listdir("/proc/self/fd")) - before
    for case in cases:
        case.joined.free()
    return more


def test_mappings_hold_no_descriptors(two: Pool) -> None:
    assert all(more <= 1 for more in two.run(descriptors))  # That of pagemap.
