"""Ranks of several hosts meet, are kept apart by firewalls and cut links, and meet again; what they say then."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rank_processes import STORE_PORT, HostRanks, Raised, rank_results

from tests.benchmarks.lab import Lab

SILENCE_SECONDS = 3
NO_ANSWER = r"no answer within 5 s\. A firewall drops what comes in there, or the link to host-a is down"


def join_and_sum(times: int = 1, timeout_seconds: float = 30.0, absent: tuple[int, ...] = ()) -> list[float]:
    """Join, sum 2^rank over all, leave: so many times."""
    import torch
    import torch.distributed as dist

    from speedlab.comm import join, leave

    if int(os.environ["RANK"]) in absent:
        return []
    sums = []
    try:
        for _ in range(times):
            world = join(timeout_seconds=timeout_seconds)
            tensor = torch.tensor([2.0**world.rank])
            dist.all_reduce(tensor)
            sums.append(tensor.item())
            leave()
    finally:
        leave(failed=True)
    return sums


def wait_while_cut_off(folder: Path) -> float:
    """Join; when host-b is cut off, wait in a collective that it does not come to."""
    import torch
    import torch.distributed as dist

    import speedlab.comm.multi_host_rendezvous as over_hosts
    from speedlab.comm import join, leave

    over_hosts.SILENCE_SECONDS = SILENCE_SECONDS
    world = join(timeout_seconds=60)
    dist.barrier()
    (folder / f"joined-{world.rank}").touch()
    while not (folder / "cut").exists():
        time.sleep(0.01)
    begin = time.monotonic()
    try:
        dist.all_reduce(torch.zeros(4))
    except RuntimeError as error:
        error.args = (f"{error} (after {time.monotonic() - begin:.1f} s)",)
        raise
    finally:
        leave(failed=True)
    return time.monotonic() - begin


def await_true(check: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def new_generation(folder: Path, number: int) -> None:
    (folder / "generation").write_text(str(number))


@pytest.mark.timeout(120)
def test_meeting_over_two_hosts(two: Lab, tmp_path: Path) -> None:
    a, b = two.hosts
    ranks = HostRanks(two, 2, tmp_path)
    assert rank_results(ranks.run(join_and_sum, 3)) == [[15.0] * 3] * 4

    new_generation(tmp_path, 1)
    said = ranks.run(join_and_sum, 1, 2.0, (2, 3))
    assert [result.text if isinstance(result, Raised) else result for result in said] == [
        *[f"rank 2, rank 3 did not come to the meeting of ranks at {ranks.store.words} within 2 s"] * 2,
        [],
        [],
    ]

    # A firewall before the store: who connects is told at once.
    new_generation(tmp_path, 2)
    a.forbid(STORE_PORT, silently=False)
    said = ranks.run(join_and_sum, 1, 2.0)
    to_store = f"host-b cannot reach host-a ({a.address}) at TCP port {STORE_PORT}: "
    assert [result.text for result in said[2:]] == [
        to_store + "a firewall forbids it; ports that ranks listen on must be open between the hosts"
    ] * 2
    assert [result.kind for result in said] == ["MeetingFailed"] * 4
    b.run("ip", "rule", "del", "dport", str(STORE_PORT))

    # One that is silent, before the ports that connections between ranks take.
    new_generation(tmp_path, 3)
    a.forbid("32768-60999")
    begin = time.monotonic()
    said = ranks.run(join_and_sum, 1, 20.0)
    assert time.monotonic() - begin < 10
    way = re.escape(f"host-b cannot reach host-a ({a.address}) at TCP port ") + r"\d+: " + NO_ANSWER
    for result in said:
        assert result.kind == "MeetingFailed"
        assert re.search(way, result.text), result.text
    a.run("ip", "rule", "del", "sport", "32768-60999")

    # A link that is cut under a collective: both sides say whom they waited for, long before the group's timeout.
    new_generation(tmp_path, 4)
    ranks.begin(wait_while_cut_off, tmp_path)
    await_true(lambda: all((tmp_path / f"joined-{rank}").exists() for rank in range(4)))
    b.cut()
    (tmp_path / "cut").touch()
    said = ranks.results(30)
    for result, own, other in ((said[0], "0", "2"), (said[2], "2", "0")):
        own_host, other_host = ("host-a", "host-b") if own == "0" else ("host-b", "host-a")
        expected = f"rank {own} waited for rank {other} of {other_host} in a collective, on {own_host}: "
        assert result.kind == "PeerLost"
        assert result.text.startswith(expected), result.text
        assert float(result.text.rpartition("(after ")[2].split()[0]) < 2 * SILENCE_SECONDS + 2
    for result in (said[1], said[3]):
        assert result.kind == "PeerLost"

    # Cut off, nobody meets; with the link back, everybody does.
    new_generation(tmp_path, 5)
    said = ranks.run(join_and_sum, 1, 8.0)
    assert said[2].text.startswith(to_store), said[2].text
    assert said[0].text.startswith("rank 2, rank 3 did not come")
    b.mend()
    new_generation(tmp_path, 6)
    assert rank_results(ranks.run(join_and_sum, 2)) == [[15.0] * 2] * 4
