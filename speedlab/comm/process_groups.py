"""Process groups of torch.distributed, one for each set of ranks and channel, and groups over hosts as a grid.

- `ProcessGroups`: a process group, its tags, and the objects that hold its works.
- `HierarchicalGroups`: a group over several hosts as hosts by places. A rail is the set of ranks with one place, one on
  each host. If values are first summed inside each host, slice by slice, they cross the network once per rail and not
  once per rank: 1/L of the bytes for L ranks per host.
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
        """Release the works, because this rank has left the world."""


class ProcessGroups:
    """The connections of some ranks, and the tags of their exchanges.

    Every exchange has its own tag, so messages of an aborted pass are never mistaken for others.
    """

    _TAGS = 2**30
    """Tags below this number come from `take_tags`, others from `next_tag`."""
    _NUMBERS, _SIZES = 2**18, 2**12

    def __init__(self, group: Any) -> None:
        self._group = group
        self._holders: weakref.WeakSet[WorkHolder] = weakref.WeakSet()
        self._tag = self._exchanges = 0

    @property
    def group(self) -> Any:
        """The process group.

        Raises:
            PeerLost: After this rank has left the world.
        """
        if self._group is None:
            raise PeerLost("this rank has left the world of ranks to which these connections belonged")
        return self._group

    def held_by(self, holder: WorkHolder) -> None:
        """Call the holder's `cut` when the world is left.

        Args:
            holder: Holds works of this group.
        """
        self._holders.add(holder)

    def cut(self) -> None:
        """Release the group and all works, even if an engine, an exchange or an error is kept.

        gloo closes connections only after the process group and all its works are gone, and until then peers wait for
        this rank.
        """
        self._group = None
        for holder in list(self._holders):
            holder.cut()

    def next_tag(self, nbytes: int) -> int:
        """Return the tag of the next exchange of flat parameters.

        Ranks in different calls may exchange pieces of different sizes under one number, where gloo would end the
        process. The size is part of the tag, so each rank waits instead and reports the calls after the timeout.

        Args:
            nbytes: Bytes of a piece.
        """
        self._exchanges = (self._exchanges + 1) % self._NUMBERS
        return self._TAGS + self._exchanges * self._SIZES + zlib.crc32(str(nbytes).encode()) % self._SIZES

    def take_tags(self, count: int) -> int:
        """Reserve consecutive tags and return the first one. The caller may stop before it uses all.

        Args:
            count: Number of tags.
        """
        if self._tag + count >= self._TAGS:
            self._tag = 0
        first = self._tag + 1
        self._tag += count
        return first


_wires: dict[tuple[str, tuple[int, ...]], ProcessGroups] = {}
"""Process groups of this world, by channel and ranks. `forget_process_groups` clears them when the world is left."""


def groups_of_world(channel: str, ranks: tuple[int, ...]) -> ProcessGroups:
    """Return the connections of `ranks` for `channel`. The first call creates them; all these ranks must make it.

    Ranks in several groups ask for them in one order of channels, which avoids deadlocks.

    Args:
        channel: Name of the use.
        ranks: Global ranks.

    Raises:
        PeerLost: If a rank does not arrive.
    """
    known = _wires.get((channel, ranks))
    if known is None or not dist.is_initialized():
        # Only members meet, so the groups of an axis are made in parallel. torch names a group by its ranks and by a
        # counter of this process, so every rank must make the same number of groups.
        known = ProcessGroups(_new_group(ranks))
        if STORE in os.environ:
            bound_silence()
        _wires[channel, ranks] = known
    return known


def _new_group(ranks: tuple[int, ...]) -> Any:
    """Create a group. Raises PeerLost if a rank does not arrive."""
    limit = limit_of_a_group()
    with (
        lost_peers(f"rank {dist.get_rank()}, to make a group of ranks, waited for"),
        limited_store(limit.total_seconds()),
    ):
        return dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True)


def limit_process_groups() -> None:
    """Set the current timeout for all existing groups, after the user has changed it."""
    for known in _wires.values():
        limit_group(known.group, limit_of_a_group().total_seconds())


def forget_process_groups(*, failed: bool = False) -> None:
    """Forget all connections, because the world was left or destroyed.

    Args:
        failed: Whether this rank leaves because of a failure. Otherwise works are not cut, because a slower rank may
            still receive messages of this rank.
    """
    for known in _wires.values() if failed else ():
        known.cut()
    _wires.clear()


_Group = TypeVar("_Group")


class HierarchicalGroups(NamedTuple, Generic[_Group]):
    """A group over several hosts, as seen by one rank."""

    inside: _Group
    """Ranks of this host, by place."""
    across: _Group
    """Ranks with this place, by host."""
    places: tuple[tuple[int, ...], ...]
    """For each place, the indices of its ranks in the whole group, by host."""


def places_of(hosts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...] | None:
    """Return `HierarchicalGroups.places`; None if the group is no regular grid.

    That is: one rank per host, different numbers of ranks, or different orders of hosts at two places (torch sorts the
    ranks of a group).

    Args:
        hosts: Ranks of each host, as indices in the group.
    """
    widths = {len(ranks) for ranks in hosts}
    if len(hosts) < 2 or len(widths) > 1 or widths == {1}:
        return None
    places = tuple(zip(*hosts, strict=True))
    return places if all(list(place) == sorted(place) for place in places) else None
