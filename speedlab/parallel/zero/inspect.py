"""Looking at a parameter that lives in a flat: its true shape, who owns which part, and the whole of it."""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from speedlab.comm import exchange_numbers
from speedlab.parallel.zero.parameter import ReshardedParameter, UnshardedParameter, find, places
from speedlab.parallel.zero.zero import Zero


def name_of(parameter: Tensor) -> tuple[Zero, str] | None:
    """What partitions this parameter, and its full name; None when nothing does."""
    place = find(parameter)
    return None if place is None else (place.zero, place.slot.name)


def remember(zero: Zero) -> None:
    """Make the parameters of `zero` print with their owners and known to `gather`, as long as `zero` lives."""
    this = weakref.ref(zero)
    ids = []
    for unit_index, unit in enumerate(zero.units):
        for flat_index, flat in enumerate(unit.flats):
            for index, parameter in enumerate(flat.parameters):
                places[id(parameter)] = (this, unit_index, flat_index, index)
                ids.append(id(parameter))
                if type(parameter) is nn.Parameter:
                    parameter.__class__ = UnshardedParameter if flat.gathered else ReshardedParameter
    weakref.finalize(zero, _drop, ids, this)


def _drop(ids: list[int], owner: weakref.ref[Zero]) -> None:
    for key in ids:
        if key in places and places[key][0] is owner:
            del places[key]


def forget(zero: Zero) -> None:
    """Undo `remember`."""
    for flat in zero.flats:
        for parameter in flat.parameters:
            places.pop(id(parameter), None)
            if isinstance(parameter, UnshardedParameter):
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]  # back to what it was


def agree_on_gather(parameters: Sequence[Tensor]) -> None:
    """Find out whether all ranks that have to gather these `parameters` do so. Collective over them.

    Raises RuntimeError where they gather different ones, PeerLost where a rank does not come."""
    known = [place for place in map(find, parameters) if place is not None]
    absent = [place for place in known if place.zero.params_unsharded_on_demand and place.unit.gathers is None]
    if not absent:
        return
    ranks = absent[0].flat.gather_group.ranks
    own = [len(absent), zlib.crc32("\n".join(place.slot.name for place in absent).encode())]
    found = exchange_numbers(own, ranks)
    if any(each != found[0] for each in found):
        counts = ", ".join(f"rank {rank}: {count}" for rank, (count, _) in zip(ranks, found, strict=True))
        raise RuntimeError(
            f"gather: the ranks ask for different parameters ({counts}). Call it on all ranks with the same parameters "
            "in the same order."
        )


@torch.no_grad()
def gather_partitions(parameter: Tensor) -> Tensor:
    """The value of a parameter whole over the dp ranks, as a new tensor. Collective over them where it is partitioned;
    one that nothing partitions is simply copied. Its last update is in it; RuntimeError says where that takes
    ranks that may not be here."""
    place = find(parameter)
    if place is not None:
        place.zero.finish_update()
        place.zero.refuse_late("gather")
    if place is None or not place.flat.zero_policy.params_unsharded_on_demand:
        return parameter.detach().clone()
    if place.unit.gathers is not None:  # A pass has left it here, or on its way.
        place.unit.finish_gather()
        return parameter.detach().clone()
    place.flat.gather().wait()
    try:
        return parameter.detach().clone()
    finally:
        place.flat.release()
