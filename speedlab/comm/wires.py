"""The connections between ranks: process groups of torch.distributed, one for each set of ranks and channel."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist

from speedlab.comm.activity import explained
from speedlab.comm.errors import PeerLost, reason_of, tells_of_lost_peer
from speedlab.comm.group_limits import limit_group, limited_store
from speedlab.comm.limits import limit_of_a_group
from speedlab.comm.over_hosts import STORE, bound_silence


class Wires:
    """The connections of some ranks, and the tags that their exchanges have used.

    Every exchange has a tag of its own, so that what a broken pass left behind can never be taken for something else.
    """

    _TAGS = 2**30

    def __init__(self, group: Any) -> None:
        self.group = group
        self._tag = 0

    def next_tag(self) -> int:
        return self.take_tags(1)

    def take_tags(self, count: int) -> int:
        """The first of so many in a row, for who may leave before using all."""
        if self._tag + count >= self._TAGS:
            self._tag = 0
        first = self._tag + 1
        self._tag += count
        return first


_wires: dict[tuple[str, tuple[int, ...]], Wires] = {}
"""Process groups that exist in this world, by channel and ranks; `leave` empties it together with the world."""


def wires(channel: str, ranks: tuple[int, ...]) -> Wires:
    """The connections of `ranks` for `channel`, made when it is first asked for: then all of them must ask.

    Ranks that belong to several groups ask for them in one order of channels, so that none waits in a circle.
    """
    known = _wires.get((channel, ranks))
    if known is None or not dist.is_initialized():
        # Only members meet, so that an axis of the layout can make its groups side by side. torch then names a group
        # after its ranks and after how many this process has: every rank must make equally many.
        known = Wires(_new_group(ranks))
        if STORE in os.environ:
            bound_silence()
        _wires[channel, ranks] = known
    return known


def _new_group(ranks: tuple[int, ...]) -> Any:
    """Raises PeerLost where a rank does not come to the meeting of the group."""
    limit = limit_of_a_group()
    try:
        with limited_store(limit.total_seconds()):
            return dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)
    except RuntimeError as error:
        if isinstance(error, PeerLost) or not tells_of_lost_peer(error):
            raise
        text = f"rank {dist.get_rank()} waited for the ranks {list(ranks)} to make a group ({reason_of(error)})"
        raise PeerLost(explained(text)) from error


def limit_wires() -> None:
    """Give all groups that there are the limit of today: the user gave another one."""
    for known in _wires.values():
        limit_group(known.group, limit_of_a_group().total_seconds())


def forget_wires() -> None:
    """The world they belonged to is left, or somebody else has destroyed it."""
    _wires.clear()
