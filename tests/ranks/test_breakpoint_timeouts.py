"""While a person may think at a breakpoint no collective is late; afterwards each is again."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ranks.pool import COLLECTIVE_TIMEOUT_SECONDS, Pool
from speedlab.cluster.worker import remote
from speedlab.comm import CommStats, Group, breakpoint_timeouts, join, leave, patience
from speedlab.comm.group_timeouts import limit_group as set_limit
from speedlab.comm.group_timeouts import limit_of
from speedlab.comm.process_groups import groups_of_world
from speedlab.comm.timeouts import PATIENT_SECONDS, TIMEOUT_SECONDS, wait_for

LIMIT_SECONDS = 0.3


def one_thinks(folder: Path) -> list[float | str]:
    """The last rank comes late: to a group that there is, and to a world that is made meanwhile."""
    rank, size = dist.get_rank(), dist.get_world_size()
    said: list[float | str] = []

    def thinks() -> None:
        if rank == size - 1:
            time.sleep(3 * LIMIT_SECONDS)

    group: Any = dist.new_group(timeout=datetime.timedelta(seconds=LIMIT_SECONDS))
    with patience():
        thinks()
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        said.append(total.item())
        thinks()
        if rank == size - 1:
            wait_for(group.send([torch.full((1,), 7.0)], 0, 1))
        elif rank == 0:
            wait_for(group.recv([total], size - 1, 1))
            said.append(total.item())
    if rank < size - 1:  # Nobody thinks any more: who does not come is late.
        try:
            dist.all_reduce(total, group=group)
        except RuntimeError as error:
            said.append(f"late: {error}")
    dist.barrier()
    leave()
    with (
        mock.patch.dict(os.environ, {"SPEEDLAB_RENDEZVOUS": str(folder), "RANK": str(rank), "WORLD_SIZE": str(size)}),
        patience(),
    ):
        thinks()
        world = join(timeout_seconds=LIMIT_SECONDS)
        wires = Group(range(size), CommStats(), world.device)
        thinks()
        said.append(wires.sum_scalars(torch.tensor([rank + 1.0])).item())
        del wires
        leave()
    return said


@pytest.mark.parametrize("ranks", [2, (2, "gloo")], indirect=True, ids=["shared", "gloo"])
def test_nobody_is_late_while_a_person_may_think(ranks: Pool, tmp_path: Path) -> None:
    first, second = ranks.run(one_thinks, tmp_path, timeout=40)
    ranks.new_group()
    assert (first[:2], first[3]) == ([2.0, 7.0], 3.0)
    assert str(first[2]).startswith("late: ")
    assert second == [2.0, 3.0]


def limits_of_groups(folder: Path) -> list[list[float]]:
    """Of a group that is made before, of one that is made meanwhile, of the world, and of its store: meanwhile, and
    afterwards; then of a world that is joined meanwhile, and of its store."""
    everybody = tuple(range(dist.get_world_size()))
    dist.barrier()
    store = distributed_c10d._get_default_store()
    store.set_timeout(datetime.timedelta(seconds=17))
    before = groups_of_world("before", everybody).group

    def limits(*groups: Any) -> list[float]:
        store = distributed_c10d._get_default_store()
        return [*map(limit_of, groups), store.timeout.total_seconds()]

    handler = signal.signal(signal.SIGINT, remote._interrupt)
    try:
        with patience():
            meanwhile = groups_of_world("meanwhile", everybody).group
            found = [limits(before, meanwhile, dist.group.WORLD)]
            interrupts = mock.patch.object(breakpoint_timeouts, "limit_group", interrupted_limit)
            interrupts.start()
        interrupts.stop()
        found.append(limits(before, meanwhile, dist.group.WORLD))
        alone = {"SPEEDLAB_RENDEZVOUS": str(folder / str(dist.get_rank())), "RANK": "0", "WORLD_SIZE": "1"}
        leave()
        with mock.patch.dict(os.environ, alone), contextlib.suppress(KeyboardInterrupt), patience():
            join()
            found.append(limits(dist.group.WORLD))
            signal.raise_signal(signal.SIGINT)
            found.append([])
        found.append(limits(dist.group.WORLD))
    finally:
        signal.signal(signal.SIGINT, handler)
        leave()
    return found


def interrupted_limit(group: Any, seconds: float) -> None:
    """As `limit_group`, with a signal before it."""
    signal.raise_signal(signal.SIGINT)
    set_limit(group, seconds)


@pytest.mark.parametrize("ranks", [(2, "gloo")], indirect=True, ids=["gloo"])
def test_groups_and_stores_are_patient_meanwhile_and_then_have_the_usual_limit(ranks: Pool, tmp_path: Path) -> None:
    """Whatever interrupt comes while they are given back."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    (found, _), own = ranks.run(limits_of_groups, tmp_path), COLLECTIVE_TIMEOUT_SECONDS
    ranks.new_group()
    assert found == [
        [PATIENT_SECONDS] * 4,
        [TIMEOUT_SECONDS, TIMEOUT_SECONDS, own, 17],
        [PATIENT_SECONDS] * 2,
        [TIMEOUT_SECONDS] * 2,
    ]
