"""A group that spans hosts, with several of its ranks on each, seen as a grid: hosts by places within a host.

A rail is the ranks of one place on every host. What is summed inside each host first, slice by slice, crosses the
network once on each rail instead of once from every rank: 1/L of the bytes, of L ranks a host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

_Group = TypeVar("_Group")


class Rails(NamedTuple, Generic[_Group]):
    """How one rank of such a group sees it."""

    inside: _Group
    """The ranks of this host, by their places."""
    across: _Group
    """The ranks of this place, by hosts."""
    places: tuple[tuple[int, ...], ...]
    """For each place, the indices of its ranks in the whole group, by hosts."""


def places_of(hosts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...] | None:
    """`Rails.places` of the ranks (indices in a group) of each host; None where hosts have one each, or unequally
    many, or in another order at one place than at another: torch sorts the ranks of a group."""
    widths = {len(ranks) for ranks in hosts}
    if len(hosts) < 2 or len(widths) > 1 or widths == {1}:
        return None
    places = tuple(zip(*hosts, strict=True))
    return places if all(list(place) == sorted(place) for place in places) else None
