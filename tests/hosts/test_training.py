"""Training whose ranks are on several hosts, beside the same on one: 2 hosts × 2 ranks and 4 × 1."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_processes import HostRanks, environment, rank_results
from ranks.layout_cases import LayoutCase, train_layouts
from ranks.pool import Pool

from speedlab.layout import Layout
from tests.benchmarks.lab import Lab

CASES = [
    LayoutCase(layout=Layout(dp=4), stage=0, steps=2, accumulation=1),
    LayoutCase(layout=Layout(dp=4), stage=3, steps=2, accumulation=1),
    LayoutCase(layout=Layout(tp=2, dp=2), stage=2, steps=2, accumulation=1),
    LayoutCase(layout=Layout(pp=2, dp=2), stage=1, steps=2, accumulation=2),
]
MORE = [
    *(LayoutCase(layout=Layout(dp=4), stage=stage) for stage in range(4)),
    *(LayoutCase(layout=Layout(tp=2, dp=2), stage=stage) for stage in range(4)),
    LayoutCase(layout=Layout(pp=2, tp=2), stage=2, schedule="interleaved"),
    LayoutCase(layout=Layout(pp=4), stage=0, schedule="zero-bubble"),
]
"""ZeRO 0-3 across hosts; tp inside a host and dp across; pp across with dp or tp inside, or one rank a host."""


@pytest.fixture(scope="module")
def one_host() -> Iterator[Pool]:
    pool = Pool(4)
    yield pool
    pool.close()


def train_over_hosts(cases: list[LayoutCase]) -> tuple[dict[str, Any], list[Any]]:
    """Join the world as an engine does, train, and leave; also what the rank found of its place."""
    import torch

    from speedlab.comm import join, leave

    torch.set_num_threads(1)
    world = join(timeout_seconds=60)
    names = environment("LOCAL_RANK", "LOCAL_WORLD_SIZE", "SPEEDLAB_HOST")
    seen = {"rank": world.rank, "host": os.uname().nodename, **names}
    paths = train_layouts(cases)
    leave()
    return seen, paths


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("hosts", "each", "cases"),
    [
        pytest.param(2, 2, CASES, id="2 hosts x 2"),
        pytest.param(4, 1, CASES, id="4 hosts x 1", marks=pytest.mark.nightly),
        pytest.param(2, 2, MORE, id="2 hosts x 2, more", marks=pytest.mark.nightly),
        pytest.param(4, 1, MORE, id="4 hosts x 1, more", marks=pytest.mark.nightly),
    ],
)
def test_losses_are_those_of_one_host(
    hosts_are_possible: None, one_host: Pool, tmp_path: Path, hosts: int, each: int, cases: list[LayoutCase]
) -> None:
    with Lab(hosts) as lab:
        ranks = HostRanks(lab, each, tmp_path)
        before = [host.bytes_carried()[1] for host in lab.hosts]
        results = rank_results(ranks.run(train_over_hosts, cases, timeout=200))
        sent = [host.bytes_carried()[1] - start for host, start in zip(lab.hosts, before, strict=True)]
    on_one_host = one_host.run(train_layouts, cases, timeout=120)
    assert [seen for seen, _ in results] == [
        {
            "rank": rank,
            "host": lab_name(rank // each),
            "LOCAL_RANK": str(rank % each),
            "LOCAL_WORLD_SIZE": str(each),
            "SPEEDLAB_HOST": lab_name(rank // each),
        }
        for rank in range(4)
    ]
    assert min(sent) > 100_000, "the hosts' links carried it"
    wrong = []
    for rank, (_, paths) in enumerate(results):
        for case, ours, theirs in zip(cases, paths, on_one_host[rank], strict=True):
            same_order = each == 1 or case.layout.dp <= 2
            worst = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
            if worst > (0.0 if same_order else 1e-6):
                wrong.append(f"rank {rank}, {case}: {ours.losses} instead of {theirs.losses}")
    assert not wrong, "\n".join(wrong)


def lab_name(number: int) -> str:
    return f"host-{'abcd'[number]}"
