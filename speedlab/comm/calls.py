"""One small exchange of all ranks, by which they find out whether they are in the same call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from speedlab.comm.activity import lost_peers
from speedlab.comm.wires import wires

_CHANNEL = "calls"


def prepare_exchange(ranks: Sequence[int]) -> None:
    """Make the connections of `exchange_numbers` where there are none. Collective over these ranks: to be called where
    all of them come for sure. A rank that leaves is seen by the others on a connection, not while they make one."""
    if len(ranks) > 1:
        wires(_CHANNEL, tuple(ranks))


def exchange_numbers(own: Sequence[int], ranks: Sequence[int]) -> list[list[int]]:
    """The numbers of all `ranks`, equally many of each, in their order.

    Collective over these ranks, on connections that serve nothing else: the numbers never meet the values of
    another collective, so that a rank that is in another call leaves the others waiting, and spoils nothing. Raises
    PeerLost where a rank does not come, with the call in which each rank is.
    """
    rows = torch.zeros(len(ranks), len(own), dtype=torch.int64)
    if len(ranks) > 1:
        rank, known = dist.get_rank(), wires(_CHANNEL, tuple(ranks))
        rows[ranks.index(rank)] = torch.tensor(own)
        with lost_peers(f"rank {rank} waited for"):
            dist.all_reduce(rows, group=known.group)
    else:
        rows[0] = torch.tensor(own)
    return rows.tolist()
