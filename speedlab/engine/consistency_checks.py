"""Whether ranks that compute one batch together were given the same one.

Tensor, context and pipeline ranks of one data index each do a part of the same computation; given other tokens than its
peers, a rank makes numbers that look like a training and are none.

1. Each tensor that comes in becomes a number, a linear function of its elements modulo 2⁶⁴, where the tensor is: on a
   GPU nothing waits for it. The number of a step is the sum of those.
2. The first time, peers compare shapes, and the numbers of what came on the host, before anything is computed.
3. From then on the number rides on the sums that end a step: the first of k peers adds (k - 1) times its number, each
   other one subtracts its own, so that nothing is left in the sum over all ranks where peers have the same. The first
   rank of all adds `SAME`, which tells such a sum from one that never came.

Whether tensor ranks have the same gradients of what each of them holds whole.

A plan says which layers are cut. Of a parameter between two such layers that it forgets (a gain of each head, say) a
rank computes the gradient of its part of the values; trained with that, ranks drift apart without a word.

1. In the first steps each gradient of such a parameter becomes a few numbers, linear functions of some of its elements,
   where it is.
2. At the end of the step tensor peers compare them, also where they are; what they find rides on the sums that end a
   step. This is over when every parameter had a gradient that is not nought, after `_STEPS` steps at the latest.

Whether parameters are written into where torch does not count it: through `parameter.data`.

What is written so is lost. Values that were gathered go with it, so that backward computes with others than its
forward; those that stay have the next update of masters of more bits put over them.

1. In the first steps the words of each parameter that has come are summed, where it is. Before it goes their sum must
   be the same. (Values that only change places stay unseen.)
2. At the end of the step parameters that stay are compared with their masters.
3. What was found, also where it is, rides on the sums that end a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from speedlab.comm import Group
from speedlab.layout import ALWAYS_NAMED, AXES, KINDS
from speedlab.parallel.mesh import Mesh
from speedlab.parallel.tensor import PlanError
from speedlab.parallel.zero import FlatParam, Unit, Zero, map_tensors

_ONE_BATCH = tuple(axis for axis in reversed(AXES) if not KINDS[axis].sees_other_data)
"""Axes along which ranks compute one batch."""

SAME = 1.0
"""The sum over all ranks of what `take` gives, where peers were given the same."""

_SAMPLED_ELEMENTS = 2**16
"""At most so many elements of a tensor are looked at."""

_BITS = 22
"""Of a number that travels. Sums over 2¹⁶ ranks, each with a factor below 2¹⁴, are whole numbers that float64 holds."""

_FACTORS = 64
"""Data indices have so many factors in turn, so that differences of several do not cancel."""

_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
"""Odd numbers of 61 or 62 bits without a pattern."""


class DataConsistencyCheck:
    """What this rank was given since the last `forget`, as one number."""

    def __init__(self, mesh: Mesh, *, compare_first: bool = True) -> None:
        """`compare_first`: whether the first tensors are compared at once; collective over all ranks then."""
        self._mesh = mesh
        peers = math.prod(mesh.layout.size(axis) for axis in _ONE_BATCH)
        leads = all(mesh[axis].index == 0 for axis in _ONE_BATCH)
        self._factor = (peers - 1 if leads else -1) * (mesh.data_index % _FACTORS + 1)
        self._alone = peers == 1
        self._compare_next = compare_first
        self._count = 0
        """Tensors that came."""
        self._sums: dict[str, Tensor] = {}
        """() int64 by kind of device: of the tensors that came on it."""
        self._weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def look(self, given: Any) -> None:
        """Take note of all tensors in `given`, wherever they are. Raises ValueError on all ranks when the first ones
        differ."""
        if self._alone:
            return
        tensors: list[Tensor] = []
        given = dict(given) if isinstance(given, Mapping) else given
        map_tensors(given, lambda tensor: tensors.append(tensor) or tensor)
        for tensor in tensors:
            self._count += 1
            number, kind = self._number_of(tensor), tensor.device.type
            self._sums[kind] = self._sums[kind] + number if kind in self._sums else number
        if self._compare_next:
            self._compare([[*tensor.shape] for tensor in tensors])
            self._compare_next = False

    def take(self) -> Tensor | None:
        """What to add up over all ranks, () float64 on the device; None in layouts where no rank has peers."""
        if self._alone:
            return None
        total = torch.full((), self._on_host(), dtype=torch.int64, device=self._mesh.device)
        for kind, number in self._sums.items():
            total = total if kind == "cpu" else total + number
        small = (total >> (64 - _BITS)).double() * self._factor
        return small + (SAME if self._mesh.everyone.index == 0 else 0.0)

    def forget(self) -> None:
        """A step has ended, or is given up."""
        self._count = 0
        self._sums.clear()

    def error(self) -> ValueError:
        """Which ranks had something else than their peers. Collective over all ranks, where the sum of `take` is
        not `SAME`."""
        own = sum(int(number) for number in self._sums.values()) % 2**64
        return self._error(self._mesh.everyone.collect([self._mesh.data_index, own]))

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _number_of(self, tensor: Tensor) -> Tensor:
        values = tensor.detach().reshape(-1)
        values = values[:: max(1, math.ceil(values.numel() / _SAMPLED_ELEMENTS))]
        values = values.double().view(torch.int64) if values.is_floating_point() else values.long()
        weights = self._weights_of(values.numel(), values.device)
        return (values * weights).sum() * (_ODD[2] + 2 * self._count)

    def _weights_of(self, count: int, device: torch.device) -> Tensor:
        """(count,) int64, the same on all ranks. As many as were ever needed are kept: _SAMPLED would be 512 KiB."""
        kept = self._weights.get(device.type)
        if kept is None or kept.numel() < count:
            # Made where they are needed: a copy to a device would be waited for.
            mixed = torch.arange(1, count + 1, device=device) * _ODD[0]
            kept = self._weights[device.type] = (mixed ^ (mixed >> 31)) * _ODD[1]
        return kept[:count]

    def _on_host(self) -> int:
        """The number of what came on the host."""
        return int(self._sums["cpu"]) if "cpu" in self._sums else 0

    def _compare(self, shapes: list[list[int]]) -> None:
        mesh, own = self._mesh, [shapes, self._on_host()]
        differ = any(theirs != own for axis in _ONE_BATCH for theirs in mesh[axis].collect(own))
        if float(mesh.everyone.sum_scalars(torch.tensor([float(differ)], dtype=torch.float64))):
            self.forget()
            raise self._error(mesh.everyone.collect([mesh.data_index, own]))

    def _error(self, reports: list[Any]) -> ValueError:
        layout = self._mesh.layout
        peers: dict[int, list[tuple[int, Any]]] = {}
        for rank, (index, given) in zip(self._mesh.everyone.ranks, reports, strict=True):
            peers.setdefault(index, []).append((rank, given))
        told = []
        for members in peers.values():
            others = [rank for rank, given in members if given != members[0][1]]
            if others:
                told.append(f"rank {', '.join(map(str, others))} not what rank {members[0][0]} was given")
        *others, last = (axis for axis in _ONE_BATCH if axis in ALWAYS_NAMED or layout.size(axis) > 1)
        return ValueError(
            f"under {layout} ranks that differ only along {', '.join(others)} and {last} compute "
            f"one batch together, but were given different tokens: {'; '.join(told)}. Choose data by "
            "engine.mesh.data_index instead of the rank, or take them from the loader that initialize returns"
        )


_GRADIENT_CHECK_STEPS = 5
"""With a warm-up from nought and a layer that begins with zeros (an adapter's), what is before it has its first
gradient in the third step."""

_SAMPLED_GRADIENT_ELEMENTS = 2**16
"""At most so many elements of a gradient are looked at."""

_NUMBERS = 4
"""Differences of less than `_TOLERANCE` in all of so many numbers are chance once in a million, where ranks have
parts."""

_TOLERANCE = 0.03
"""Of a gradient's norm. What sums in bfloat16 in another order differ by is less."""


class GradientConsistencyCheck:
    """What tensor peers must have alike of the gradients of the present step."""

    def __init__(self, mesh: Mesh, zeros: Iterable[Zero]) -> None:
        self._mesh = mesh
        zeros = list(zeros)
        self._left = _GRADIENT_CHECK_STEPS if mesh["tp"].size > 1 else 0
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
        values = values[:: max(1, math.ceil(values.numel() / _SAMPLED_GRADIENT_ELEMENTS))].double()
        places = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device)
        weights = torch.stack([torch.cos(places * places * (0.7 + number)) for number in range(_NUMBERS)])
        numbers = torch.cat([(values @ values).view(1), weights @ values])
        self._seen[name] = self._seen[name] + numbers if name in self._seen else numbers


_WORD = 8

_WRITE_CHECK_STEPS = 2
"""A loop that clamps weights behind its update is seen in the second."""


class UntrackedWriteCheck:
    """What was written in the present step past the engine, on this rank."""

    def __init__(self, zeros: Iterable[Zero], everyone: Group, *, compares_masters: bool) -> None:
        """`compares_masters`: whether masters and parameters that stay are of one update at the end of a step."""
        self._everyone, self._compares_masters = everyone, compares_masters
        self._left = _WRITE_CHECK_STEPS
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
    def _flats(self) -> list[FlatParam]:
        return [flat for unit in self._units for flat in unit.flats]

    def _compare_masters(self, flat: FlatParam) -> None:
        narrow = flat.narrow
        stays = not (flat.zero_policy.params_unsharded_on_demand or flat.lies_away or flat.rounded or flat.ahead)
        # What torch has counted, in parameters or masters, will be that of both.
        if narrow is None or not stays or flat.written() or flat.master._version != self._versions[flat.name]:
            return
        low, high = flat.state_range
        made = flat.master.to(narrow.dtype)
        differs = (narrow != made) & ~(narrow.isnan() & made.isnan())
        ranges = [slice(max(slot.range.start, low) - low, min(slot.range.stop, high) - low) for slot in flat.slots]
        here = [differs[own].any() if own.start < own.stop else differs.new_zeros(()) for own in ranges]
        self._add(flat, torch.stack(here))

    def _add(self, flat: FlatParam, written: Tensor) -> None:
        before = self._written.get(flat.name)
        self._written[flat.name] = written if before is None else before | written


def _numbers(full: Tensor, flat: FlatParam) -> Tensor:
    words, size = full.view(torch.int64), full.element_size()  # No wider type has to be made of them for a sum.
    ends = [(slot.range.start * size // _WORD, -(-slot.range.stop * size // _WORD)) for slot in flat.slots]
    return torch.stack([words[start:stop].sum() for start, stop in ends])
