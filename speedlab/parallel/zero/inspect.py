"""Inspect a parameter that is a view of a flat: its true shape, the owner of each part, and its full value."""

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
    """Return the Zero that partitions a parameter, and the parameter's full name.

    Args:
        parameter: Any tensor.

    Returns:
        None for a tensor that no engine has.
    """
    place = find(parameter)
    return None if place is None else (place.zero, place.slot.name)


def remember(zero: Zero) -> None:
    """Register parameters, so that they print their owners and `gather` finds them.

    Args:
        zero: The Zero of the parameters. The registration ends when it is freed.
    """
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
    """Undo `remember`.

    Args:
        zero: The Zero of the parameters.
    """
    for flat in zero.flats:
        for parameter in flat.parameters:
            places.pop(id(parameter), None)
            if isinstance(parameter, UnshardedParameter):
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]  # back to what it was


def agree_on_gather(parameters: Sequence[Tensor]) -> None:
    """Check that all ranks that must gather these parameters do so. Collective over these ranks.

    Args:
        parameters: The tensors that this rank gathers.

    Raises:
        RuntimeError: The ranks gather different parameters.
        PeerLost: A rank does not answer.
    """
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
    """Return the full value of a parameter as a new tensor, with its last update. Collective if the parameter is
    partitioned. A tensor that no engine has is copied.

    Args:
        parameter: Any tensor.

    Raises:
        RuntimeError: A delayed update is under way and needs other ranks.
    """
    place = find(parameter)
    if place is not None:
        place.zero.finish_update()
        place.zero.refuse_late("gather")
    if place is None or not place.flat.zero_policy.params_unsharded_on_demand:
        return parameter.detach().clone()
    if place.unit.gathers is not None:  # A pass left the unit gathered, or its gather is pending.
        place.unit.finish_gather()
        return parameter.detach().clone()
    place.flat.gather().wait()
    try:
        return parameter.detach().clone()
    finally:
        place.flat.release()
