"""Collectives and messages over a pretended link: the values of always, held up for as long as the bytes would take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from ranks.pool import Pool
from speedlab.comm import CommStats, Group
from speedlab.comm.simulated_link import SimulatedLink
from speedlab.network import LinkRate

NUMEL = 1000
RATE = LinkRate(bits_per_second=8000 * 8, latency_seconds=0.25)
"""A flat of 1000 float32 takes .5 s."""


def held_up() -> dict[str, Any]:
    """What each way of sending gave, and how long it was held up by a clock that stands still."""
    slept: list[float] = []
    traffic = CommStats()
    rank, size = dist.get_rank(), dist.get_world_size()
    group = Group(list(range(size)), traffic, torch.device("cpu"))
    found: dict[str, Any] = {}

    def act(name: str, call: Any) -> None:
        slept.clear()
        # A new line each time: it is free.
        group._line = SimulatedLink(RATE, clock=lambda: 0.0, sleep=slept.append)
        value = call()
        found[name] = value, list(slept)

    whole = torch.full((NUMEL,), float(rank + 1))
    full, shard = group.empty(NUMEL, torch.float32), group.empty(NUMEL // size, torch.float32)

    def gather() -> float:
        shard.fill_(rank + 1.0)
        group.all_gather(full, shard).wait()
        group.wait_until_all_read()
        return float(full.sum())

    def reduce() -> float:
        full.copy_(whole)
        group.reduce_scatter(full, shard).wait()
        group.wait_until_all_read()
        return float(shard.sum())

    def message() -> float:
        tag, other = group.take_tags(1), torch.zeros(NUMEL)
        if rank == 0:
            group.send(whole, 1, tag).wait()
        else:
            group.receive(other, 0, tag).wait()
        return float(other.sum())

    act("all_gather", gather)
    act("reduce_scatter", reduce)
    act("sum", lambda: float(group.sum(whole).sum()))
    act("message", message)
    act("rotate", lambda: float(group.rotate(whole, group.take_tags(1)).wait().sum()))
    group._line = None
    group.barrier()
    found["pretended"] = traffic.link_bytes["pretended 64 kbit/s 250 ms"]
    return found


@pytest.mark.parametrize("ranks", [2, (2, "gloo")], indirect=True, ids=["shared", "gloo"])
def test_a_transfer_takes_as_long_as_the_link_would(ranks: Pool) -> None:
    results = ranks.run(held_up)
    for rank, found in enumerate(results):
        assert found["all_gather"] == (1500.0, [pytest.approx(0.25 + 0.25)])
        assert found["reduce_scatter"] == (1500.0, [pytest.approx(0.25 + 0.25)])
        assert found["sum"] == (3000.0, [pytest.approx(0.5 + 2 * 0.25)])
        # Its receiver sends nothing, and waits as long.
        assert found["message"] == (1000.0 * rank, [pytest.approx(0.5 + 0.25)])
        assert found["rotate"] == (1000.0 * (2 - rank), [pytest.approx(0.5 + 0.25)])
        # Gather and reduce-scatter a half, a sum both; messages whole.
        assert found["pretended"] == 4 * (500 + 500 + 1000 + (1000 if rank == 0 else 0) + 1000)
