"""Whether parameters are written into where torch does not count it: through `parameter.data`.

What is written so is lost. Values that were gathered go with it, so that backward computes with others than its
forward; those that stay have the next update of masters of more bits put over them.

1. In the first steps a number for each parameter is made of the bits of what has come, where it is. Before it goes the
   number must be the same.
2. At the end of the step parameters that stay are compared with their masters.
3. What was found, also where it is, rides on the sums that end a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from speedlab.comm import Group
from speedlab.parallel.zero import Flat, Unit, Zero

_STEPS = 2
"""A loop that clamps weights behind its update is seen in the second."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UnseenWrites:
    """What was written in the present step past the engine, on this rank."""

    def __init__(self, zeros: Iterable[Zero], everyone: Group, *, compares_masters: bool) -> None:
        """`compares_masters`: whether masters and parameters that stay are of one update at the end of a step."""
        self._everyone, self._compares_masters = everyone, compares_masters
        self._left = _STEPS
        self._units = [unit for zero in zeros for unit in zero.units]
        for unit in self._units:
            unit.watch = self
        self._came: dict[str, Tensor] = {}
        """(parameters,) int64 by flat: the numbers of those that are here."""
        self._written: dict[str, Tensor] = {}
        """(parameters,) bool by flat."""

    @torch.no_grad()
    def came(self, unit: Unit) -> None:
        """The unit's values have been gathered."""
        for flat in unit.flats:
            self._came[flat.name] = _numbers(flat.full, flat)

    @torch.no_grad()
    def goes(self, unit: Unit) -> None:
        """They are about to be released."""
        for flat in unit.flats:
            before = self._came.pop(flat.name, None)
            if before is not None:
                self._add(flat, before != _numbers(flat.full, flat))

    @torch.no_grad()
    def take(self, device: torch.device) -> Tensor | None:
        """How many parameters, () float64 on the device; None when nobody looks any more."""
        if not self._left:
            return None
        if self._compares_masters:
            for flat in (flat for unit in self._units for flat in unit.flats):
                self._compare_masters(flat)
        found = [written.sum() for written in self._written.values()]
        return torch.stack(found).sum().double() if found else torch.zeros((), dtype=torch.float64, device=device)

    def took(self) -> None:
        """A step has an update."""
        self._left = max(0, self._left - 1)
        if not self._left:
            for unit in self._units:
                unit.watch = None
            self._units, self._came = [], {}

    def forget(self) -> None:
        """A step has ended, or is given up."""
        self._written.clear()

    def error(self, step: int, *, updated: bool) -> RuntimeError:
        """Of which parameters, where `take` told of some; `updated`: whether backward has used their gradients.
        Collective over all ranks."""
        own = [
            flat.slots[index].name
            for flat in (flat for unit in self._units for flat in unit.flats)
            for index in self._written.get(flat.name, torch.zeros(0)).nonzero().flatten().tolist()
        ]
        names = list(dict.fromkeys(name for told in self._everyone.collect(own) for name in told))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        made = "optimizer.in_backward has made the update: set up the engine anew" if updated else "No update was made"
        return RuntimeError(
            f"step {step}: {names[0]}{more}: written into through parameter.data, where the engine cannot see it and "
            "the values are lost. Write into the parameter itself, under torch.no_grad() and between two steps; a "
            f"forward that writes into its own needs a ZeRO stage below 3. {made}"
        )

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _compare_masters(self, flat: Flat) -> None:
        narrow = flat.narrow
        stays = not (flat.residency.parameters_come or flat.lies_away or flat.rounded or flat.ahead)
        if narrow is None or not stays or flat.written():  # What torch has counted will be the masters'.
            return
        low, high = flat.state_range
        differs = _bits(narrow) != _bits(flat.master.to(narrow.dtype))
        ranges = [slice(max(slot.range.start, low) - low, min(slot.range.stop, high) - low) for slot in flat.slots]
        here = [differs[own].any() if own.start < own.stop else differs.new_zeros(()) for own in ranges]
        self._add(flat, torch.stack(here))

    def _add(self, flat: Flat, written: Tensor) -> None:
        before = self._written.get(flat.name)
        self._written[flat.name] = written if before is None else before | written


def _numbers(full: Tensor, flat: Flat) -> Tensor:
    bits = _bits(full)
    return torch.stack([bits[slot.range].sum() for slot in flat.slots])


def _bits(values: Tensor) -> Tensor:
    return values.view(_BITS[values.element_size()])
