"""Whether parameters are written into where torch does not count it: through `parameter.data`.

What is written so is lost. Values that were gathered go with it, so that backward computes with others than its
forward; those that stay have the next update of masters of more bits put over them.

1. In the first steps the words of each parameter that has come are summed, where it is. Before it goes their sum must
   be the same. (Values that only change places stay unseen.)
2. At the end of the step parameters that stay are compared with their masters.
3. What was found, also where it is, rides on the sums that end a step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from speedlab.comm import Group
from speedlab.parallel.zero import Flat, Unit, Zero

_WORD = 8

_STEPS = 2
"""A loop that clamps weights behind its update is seen in the second."""


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
        self._versions: dict[str, int] = {}
        """How often masters had been written to when parameters were last made of them, by flat."""
        self.updated()

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
                seen = [flat.is_written(index) for index in range(len(flat.slots))]
                changed = before != _numbers(flat.full, flat)
                self._add(flat, changed | torch.tensor(seen, device=changed.device) if any(seen) else changed)

    @torch.no_grad()
    def take(self, device: torch.device) -> Tensor | None:
        """How many parameters, () float64 on the device; None when nobody looks any more."""
        if not self._left:
            return None
        if self._compares_masters:
            for flat in self._flats:
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

    def updated(self) -> None:
        """Parameters are those of the masters."""
        self._versions = {flat.name: flat.master._version for flat in self._flats}

    def error(self, step: int, *, updated: bool) -> RuntimeError:
        """Of which parameters, where `take` told of some; `updated`: whether backward has used their gradients.
        Collective over all ranks."""
        own = [
            flat.slots[index].name
            for flat in self._flats
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

    @property
    def _flats(self) -> list[Flat]:
        return [flat for unit in self._units for flat in unit.flats]

    def _compare_masters(self, flat: Flat) -> None:
        narrow = flat.narrow
        stays = not (flat.residency.parameters_come or flat.lies_away or flat.rounded or flat.ahead)
        # What torch has counted, in parameters or masters, will be that of both.
        if narrow is None or not stays or flat.written() or flat.master._version != self._versions[flat.name]:
            return
        low, high = flat.state_range
        made = flat.master.to(narrow.dtype)
        differs = (narrow != made) & ~(narrow.isnan() & made.isnan())
        ranges = [slice(max(slot.range.start, low) - low, min(slot.range.stop, high) - low) for slot in flat.slots]
        here = [differs[own].any() if own.start < own.stop else differs.new_zeros(()) for own in ranges]
        self._add(flat, torch.stack(here))

    def _add(self, flat: Flat, written: Tensor) -> None:
        before = self._written.get(flat.name)
        self._written[flat.name] = written if before is None else before | written


def _numbers(full: Tensor, flat: Flat) -> Tensor:
    words, size = full.view(torch.int64), full.element_size()  # No wider type has to be made of them for a sum.
    ends = [(slot.range.start * size // _WORD, -(-slot.range.stop * size // _WORD)) for slot in flat.slots]
    return torch.stack([words[start:stop].sum() for start, stop in ends])
