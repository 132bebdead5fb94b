"""Sums over whole parameters, of which a rank has parts: what an update needs that looks at norms of parameters.

1. A rank sums over the elements that it has of each parameter, in float64.
2. Where optimizer states are partitioned, the dp ranks' sums are added up; where each has all of them, those of the
   first rank count: processors that are not alike round them otherwise.
3. Those of a parameter that is cut over the tensor ranks are added up over these.
4. Copies of a parameter that lie in different flats (tied embeddings in the first and last pipeline stage) take the
   mean of their sums, which differ in how they were rounded: all go on with the same bits, or the copies would part.

Each is one message for all parameters, however many there are. What stands here for sums may be any number that the
optimizer knows how to `combine` (a largest one, say).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from speedlab.comm import Group
from speedlab.parallel.zero import Flat
from speedlab.placement import Holders, Placement


class ParameterSums:
    """The parameters of a rank's flats, numbered, and how sums over them come together."""

    def __init__(self, flats: Sequence[Flat], placement: Placement, axes: Mapping[str, Group]) -> None:
        """`axes`: groups by the names that rows of the table have for them."""
        self._flats = list(flats)
        self.first: dict[str, int] = {}
        """By name of a flat, the number of its first slot's parameter."""
        self._cut: dict[Group, list[int]] = {}
        self._copies: dict[Group, list[int]] = {}
        self.count = 0
        for flat in flats:
            self.first[flat.name] = self.count
            for number, slot in enumerate(flat.slots, self.count):
                row = placement[slot.name]
                for axis in row.cut_over:
                    self._cut.setdefault(axes[axis], []).append(number)
                for axis in row.summed_over[:-1]:
                    self._copies.setdefault(axes[axis], []).append(number)
            self.count += len(flat.slots)

    def zeros(self, each: int) -> Tensor:
        """(count, each) float64, beside the masters."""
        device = self._flats[0].master.device if self._flats else None
        return torch.zeros(self.count, each, dtype=torch.float64, device=device)

    def over_ranks(self, own: Tensor, combine: Callable[[Tensor], Tensor]) -> Tensor:
        """The sums (count, k) over whole parameters, of this rank's `own`, over the elements that it has the state of.
        Both in float64. `combine`: (ranks, parameters, k) → (parameters, k). Collective over the ranks of a model's
        part."""
        if not self._flats:
            return own
        total, flat = own, self._flats[0]
        every = _of_all(flat.gather_group, total)  # 2
        total = combine(every) if flat.residency.optimizer_states is Holders.PARTITIONED else every[0]
        for group, numbers in self._cut.items():  # 3
            total[numbers] = combine(_of_all(group, total[numbers]))
        for group, numbers in self._copies.items():  # 4
            total[numbers] = _of_all(group, total[numbers]).mean(0)
        return total


def _of_all(group: Group, own: Tensor) -> Tensor:
    """What each rank of the group has, (ranks, …)."""
    return group.gather_along(own[None], 0)
