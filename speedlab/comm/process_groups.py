"""The connections between ranks: process groups of torch.distributed, one for each set of ranks and channel.

A group that spans hosts, with several of its ranks on each, seen as a grid: hosts by places within a host.

A rail is the ranks of one place on every host. What is summed inside each host first, slice by slice, crosses the
network once on each rail instead of once from every rank: 1/L of the bytes, of L ranks a host.
"""

from __future__ import annotations

import os
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from speedlab.comm.errors import PeerLost
from speedlab.comm.group_timeouts import limit_group, limited_store
from speedlab.comm.multi_host_rendezvous import STORE, bound_silence
from speedlab.comm.rank_activity import lost_peers
from speedlab.comm.timeouts import limit_of_a_group


class WorkHolder(Protocol):
    """An object that holds works of a process group."""

    def cut(self) -> None:
        """Let go of them: this rank has left the world."""


class ProcessGroups:
    """The connections of some ranks, and the tags that their exchanges have used.

    Every exchange has a tag of its own, so that what a broken pass left behind can never be taken for something else.
    """

    _TAGS = 2**30
    """Tags below are those of `take_tags`, tags from there on those of `next_tag`."""
    _NUMBERS, _SIZES = 2**18, 2**12

    def __init__(self, group: Any) -> None:
        self._group = group
        self._holders: weakref.WeakSet[WorkHolder] = weakref.WeakSet()
        self._tag = self._exchanges = 0

    @property
    def group(self) -> Any:
        """The process group. Raises PeerLost after this rank has left the world."""
        if self._group is None:
            raise PeerLost("this rank has left the world of ranks to which these connections belonged")
        return self._group

    def held_by(self, holder: WorkHolder) -> None:
        """Cut this `holder`, too, when the world is left."""
        self._holders.add(holder)

    def cut(self) -> None:
        """Let the connections close, whoever keeps an engine, an exchange or an error: gloo closes them when neither
        the process group nor any of its works is left, and until then peers wait for this rank."""
        self._group = None
        for holder in list(self._holders):
            holder.cut()

    def next_tag(self, nbytes: int) -> int:
        """The tag of the next exchange of flats, in pieces of so many bytes.

        Ranks that are in different calls exchange pieces of different sizes under one number, where gloo would end the
        process. Their tags differ, so that each waits for its peer, and names the calls after `timeout_seconds`."""
        self._exchanges = (self._exchanges + 1) % self._NUMBERS
        return self._TAGS + self._exchanges * self._SIZES + zlib.crc32(str(nbytes).encode()) % self._SIZES

    def take_tags(self, count: int) -> int:
        """The first of so many in a row, for who may leave before using all."""
        if self._tag + count >= self._TAGS:
            self._tag = 0
        first = self._tag + 1
        self._tag += count
        return first


_wires: dict[tuple[str, tuple[int, ...]], ProcessGroups] = {}
"""Process groups that exist in this world, by channel and ranks; `leave` empties it together with the world."""


def groups_of_world(channel: str, ranks: tuple[int, ...]) -> ProcessGroups:
    """The connections of `ranks` for `channel`, made when it is first asked for: then all of them must ask.

    Ranks that belong to several groups ask for them in one order of channels, so that none waits in a circle.
    """
    known = _wires.get((channel, ranks))
    if known is None or not dist.is_initialized():
        # Only members meet, so that an axis of the layout can make its groups side by side. torch then names a group
        # after its ranks and after how many this process has: every rank must make equally many.
        known = ProcessGroups(_new_group(ranks))
        if STORE in os.environ:
            bound_silence()
        _wires[channel, ranks] = known
    return known


def _new_group(ranks: tuple[int, ...]) -> Any:
    """Raises PeerLost where a rank does not come to the meeting of the group."""
    limit = limit_of_a_group()
    with (
        lost_peers(f"rank {dist.get_rank()}, to make a group of ranks, waited for"),
        limited_store(limit.total_seconds()),
    ):
        return dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)


def limit_process_groups() -> None:
    """Give all groups that there are the limit of today: the user gave another one."""
    for known in _wires.values():
        limit_group(known.group, limit_of_a_group().total_seconds())


def forget_process_groups(*, failed: bool = False) -> None:
    """Forget all connections: the world is left, or the user has destroyed it.

    Args:
        failed: this rank leaves in the middle of something. Otherwise a slower rank may still take what this one has
            sent: works that are kept are not cut.
    """
    for known in _wires.values() if failed else ():
        known.cut()
    _wires.clear()


_Group = TypeVar("_Group")


class HierarchicalGroups(NamedTuple, Generic[_Group]):
    """How one rank of such a group sees it."""

    inside: _Group
    """The ranks of this host, by their places."""
    across: _Group
    """The ranks of this place, by hosts."""
    places: tuple[tuple[int, ...], ...]
    """For each place, the indices of its ranks in the whole group, by hosts."""


def places_of(hosts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...] | None:
    """`HierarchicalGroups.places` of the ranks (indices in a group) of each host; None where hosts have one each, or
    unequally many, or in another order at one place than at another: torch sorts the ranks of a group."""
    widths = {len(ranks) for ranks in hosts}
    if len(hosts) < 2 or len(widths) > 1 or widths == {1}:
        return None
    places = tuple(zip(*hosts, strict=True))
    return places if all(list(place) == sorted(place) for place in places) else None
