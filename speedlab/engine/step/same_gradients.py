"""Whether tensor ranks have the same gradients of what each of them holds whole.

A plan says which layers are cut. Of a parameter between two such layers that it forgets (a gain of each head, say) a
rank computes the gradient of its part of the values; trained with that, ranks drift apart without a word.

1. In the first steps each gradient of such a parameter becomes a few numbers, linear functions of some of its elements,
   where it is.
2. At the end of the step tensor peers compare them, also where they are; what they find rides on the sums that end a
   step. This is over when every parameter had a gradient that is not nought, after `_STEPS` steps at the latest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor

from speedlab.parallel.mesh import Mesh
from speedlab.parallel.tensor import PlanError
from speedlab.parallel.zero import Zero

_STEPS = 5
"""With a warm-up from nought and a layer that begins with zeros (an adapter's), what is before it has its first
gradient in the third step."""

_SAMPLED = 2**16
"""At most so many elements of a gradient are looked at."""

_NUMBERS = 4
"""Differences of less than `_TOLERANCE` in all of so many numbers are chance once in a million, where ranks have
parts."""

_TOLERANCE = 0.03
"""Of a gradient's norm. What sums in bfloat16 in another order differ by is less."""


class SameGradients:
    """What tensor peers must have alike of the gradients of the present step."""

    def __init__(self, mesh: Mesh, zeros: Iterable[Zero]) -> None:
        self._mesh = mesh
        zeros = list(zeros)
        self._left = _STEPS if mesh["tp"].size > 1 else 0
        self._names = [
            row.name
            for zero in zeros
            for row in zero.placement.rows
            if row.trainable and row.part is None and "tp" not in row.summed_over
        ]
        """What each tensor rank has whole, in an order that is that of its peers, too."""
        self._seen: dict[str, Tensor] = {}
        """(1 + _NUMBERS,) float64 by parameter: the sum of squares, and the numbers."""
        self._differ: list[Tensor] = []
        """(len(_names),) bool of the step that has ended."""
        self._gradients = [flat.gradient for zero in zeros for flat in zero.flats if flat.gradient is not None]
        if self._left:
            for gradient in self._gradients:
                gradient.look = partial(self._look, [slot.name for slot in gradient.slots], {*self._names})

    def take(self) -> Tensor | None:
        """What to add up over all ranks, (2,) float64 on the device: parameters in whose gradients tensor peers differ,
        and such as had none yet. Collective over tensor peers in the first steps; None later."""
        if not self._left:
            return None
        device = self._mesh.device
        nothing = torch.zeros(1 + _NUMBERS, dtype=torch.float64, device=device)
        own = torch.stack([nothing, *(self._seen.get(name, nothing) for name in self._names)])
        every = self._mesh["tp"].gather_along(own, 0).view(-1, *own.shape)[:, 1:]
        norms = every[..., 0].amax(0).sqrt()
        apart = (every[..., 1:] - every[0, :, 1:]).abs().amax(0)
        self._differ = [(apart > _TOLERANCE * norms[:, None]).any(1)]
        return torch.stack([self._differ[0].sum(), (norms == 0).sum()]).double()

    def took(self, unseen: int) -> None:
        """A step has an update. `unseen`: what all ranks together had no gradient of."""
        if not self._left:
            return
        self._left = self._left - 1 if unseen else 0
        if not self._left:
            for gradient in self._gradients:
                gradient.look = None

    def forget(self) -> None:
        """A step has ended, or is given up."""
        self._seen.clear()
        self._differ.clear()

    def error(self, step: int, *, updated: bool) -> PlanError:
        """Of which parameters ranks have gradients that differ, where `take` told of some; `updated`: whether backward
        has used them. Collective over all ranks."""
        own = [self._names[place] for differ in self._differ for place in differ.nonzero().flatten().tolist()]
        names = list(dict.fromkeys(name for told in self._mesh.everyone.collect(own) for name in told))
        more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
        module = names[0].rpartition(".")[0]
        made = "optimizer.in_backward has made the update: set up the engine anew" if updated else "No update was made"
        return PlanError(
            f"step {step}: the gradients of {names[0]}{more} differ between the ranks of tp {self._mesh.layout.tp}, "
            "which hold it whole: each sees its part of the values only, as between two layers that are cut. Say "
            f"so with tp_plan={{…, {module!r}: 'replicated_with_grad_allreduce'}}. {made}. (Ranks that draw random "
            "numbers of their own differ, too.)"
        )

    # ---- inside ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _look(self, names: list[str], whole: set[str], index: int, gradient: Tensor) -> None:
        name = names[index]
        if name not in whole:
            return
        values = gradient.detach().reshape(-1)
        values = values[:: max(1, math.ceil(values.numel() / _SAMPLED))].double()
        places = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device)
        weights = torch.stack([torch.cos(places * places * (0.7 + number)) for number in range(_NUMBERS)])
        numbers = torch.cat([(values @ values).view(1), weights @ values])
        self._seen[name] = self._seen[name] + numbers if name in self._seen else numbers
