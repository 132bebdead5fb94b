"""Looking at a parameter that lives in a flat: its true shape, who owns which part, and the whole of it."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from speedlab.parallel.zero.flat import Flat
from speedlab.parallel.zero.slot import Slot
from speedlab.parallel.zero.unit import Unit
from speedlab.parallel.zero.zero import Zero
from speedlab.placement import Where


class FlatParameter(nn.Parameter):
    """A parameter that is a view of a flat. It differs from nn.Parameter in how it prints, and where its values are not
    here in that it cannot be copied."""

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        place = _find(self)
        if place is None:
            return super().__repr__()
        shape = "×".join(str(n) for n in self.shape)
        dtype = str(self.dtype).removeprefix("torch.")
        residency = place.flat.residency
        lies = "" if residency.parameters_at is Where.DEVICE else f" on {residency.parameters_at.value}"
        where = f"{residency.parameters.value}{lies}"
        head = f"Parameter {place.slot.name} ({shape} {dtype}, unit {place.unit.name}, {where}"
        owners = ", ".join(f"rank {rank}: [{low}:{high})" for rank, low, high in owners_of(place.flat, place.slot))
        if not place.flat.gathered:
            return f"{head}; owners: {owners}; speedlab.gather(parameter) gives the whole)"
        return f"{head}; owners: {owners})\n{self.detach()!r}"

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A plain parameter. Raises RuntimeError where its values are not here."""
        if id(self) not in memo:
            _refuse_absent(self, "copy.deepcopy")
            memo[id(self)] = nn.Parameter(self.data.clone(memory_format=torch.preserve_format), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_absent(self, "pickle (torch.save)")
        return super().__reduce_ex__(protocol)


class _Where(NamedTuple):
    zero: Zero
    unit: Unit
    flat: Flat
    slot: Slot


_places: dict[int, tuple[weakref.ref[Zero], int, int, int]] = {}
"""id of parameter → its Zero and the indices of unit, flat and slot. Kept here, not as attributes of tensors we do not
own."""


def _find(parameter: Tensor) -> _Where | None:
    reference, unit_index, flat_index, index = _places.get(id(parameter), (lambda: None, 0, 0, 0))
    zero = reference()
    if zero is None:
        return None
    unit = zero.units[unit_index]
    flat = unit.flats[flat_index]
    return _Where(zero, unit, flat, flat.slots[index]) if flat.parameters[index] is parameter else None


def _refuse_absent(parameter: Tensor, who: str) -> None:
    place = _find(parameter)
    if place is None:
        return
    place.zero.refuse_late(who)
    if not place.flat.gathered or place.unit.gathers:  # Or they are on their way.
        raise RuntimeError(
            f"{who}: {place.slot.name} is partitioned (ZeRO stage 3) or away from the device, so that its values are "
            "not here; engine.state_dict(), on all ranks, puts all parameters together, speedlab.gather(parameter) one"
        )


def name_of(parameter: Tensor) -> tuple[Zero, str] | None:
    """What partitions this parameter, and its full name; None when nothing does."""
    place = _find(parameter)
    return None if place is None else (place.zero, place.slot.name)


def remember(zero: Zero) -> None:
    """Make the parameters of `zero` print with their owners and known to `gather`, as long as `zero` lives."""
    this = weakref.ref(zero)
    ids = []
    for unit_index, unit in enumerate(zero.units):
        for flat_index, flat in enumerate(unit.flats):
            for index, parameter in enumerate(flat.parameters):
                _places[id(parameter)] = (this, unit_index, flat_index, index)
                ids.append(id(parameter))
                if type(parameter) is nn.Parameter:
                    parameter.__class__ = FlatParameter
    weakref.finalize(zero, _drop, ids, this)


def _drop(ids: list[int], owner: weakref.ref[Zero]) -> None:
    for key in ids:
        if key in _places and _places[key][0] is owner:
            del _places[key]


def forget(zero: Zero) -> None:
    """Undo `remember`."""
    for flat in zero.flats:
        for parameter in flat.parameters:
            _places.pop(id(parameter), None)
            if type(parameter) is FlatParameter:
                parameter.__class__ = nn.Parameter  # type: ignore[assignment]  # back to what it was


def owners_of(flat: Flat, slot: Slot) -> list[tuple[int, int, int]]:
    """(rank, start, end) in elements of the parameter for each rank that owns some of it. Replicated ones are owned
    alike."""
    size = flat.padded // flat.gather_group.size
    owned = []
    for index, rank in enumerate(flat.gather_group.ranks):
        low = max(slot.offset, index * size)
        high = min(slot.offset + slot.numel, (index + 1) * size)
        if low < high:
            owned.append((rank, low - slot.offset, high - slot.offset))
    return owned


@torch.no_grad()
def gather_partitions(parameter: Tensor) -> Tensor:
    """The value of a parameter whole over the dp ranks, as a new tensor. Collective over them where it is partitioned;
    one that nothing partitions is simply copied. Its last update is in it; RuntimeError says where that takes
    ranks that may not be here."""
    place = _find(parameter)
    if place is not None:
        place.zero.finish_update()
        place.zero.refuse_late("gather")
    if place is None or not place.flat.residency.parameters_come:
        return parameter.detach().clone()
    if place.unit.gathers is not None:  # A pass has left it here, or on its way.
        place.unit.finish_gather()
        return parameter.detach().clone()
    place.flat.gather().wait()
    try:
        return parameter.detach().clone()
    finally:
        place.flat.release()
