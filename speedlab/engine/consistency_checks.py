"""Consistency checks of the first steps: same batch, same replicated gradients, no writes that torch does not see.

`DataConsistencyCheck`: ranks that compute one batch together (tensor, context and pipeline ranks of one data index)
must get the same tokens. Otherwise losses look plausible, but the training is wrong.

1. Each input tensor becomes a number: a linear function of its elements modulo 2⁶⁴, computed on the tensor's device
   without a sync. The number of a step is the sum of these numbers.
2. The first time, peers compare shapes and the numbers of host tensors before anything is computed.
3. Later, the number is part of the reduction at the end of a step. The first of k peers adds (k - 1) times its number,
   each other peer subtracts its own. Equal inputs cancel over all ranks. Rank 0 adds `SAME`, so that a valid zero sum
   differs from a sum that was never computed.

`GradientConsistencyCheck`: tensor-parallel ranks must have equal gradients of parameters that each of them holds whole.
If a plan forgets a parameter between two sharded layers (for example a gain per head), each rank computes the gradient
of its part of the values, and the replicas drift apart silently.

1. In the first steps each such gradient becomes a few linear functions of sampled elements, on its device.
2. At the end of the step tensor peers compare these numbers on the device. The result is part of the reduction at the
   end of the step. The check ends once every parameter had a nonzero gradient, or after `_GRADIENT_CHECK_STEPS` steps.

`UntrackedWriteCheck`: writes through `parameter.data` bypass torch's version counter and are lost. A release drops
written values of gathered parameters, so backward differs from forward. The next update overwrites resident parameters
with their masters.

1. In the first steps the 8-byte words of each gathered parameter are summed on its device. Before the release the sum
   must be the same. (The sum does not see values that only change places.)
2. At the end of the step resident parameters are compared with their masters.
3. The result, also on the device, is part of the reduction at the end of the step.
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
"""Mesh axes along which ranks compute one batch together."""

SAME = 1.0
"""The sum of `DataConsistencyCheck.take` over all ranks if peers got the same tensors."""

_SAMPLED_ELEMENTS = 2**16
"""Largest number of sampled elements of a tensor."""

_BITS = 22
"""Bits of the number in the reduction. Sums over 2¹⁶ ranks, each times a factor below 2¹⁴, are exact in float64."""

_FACTORS = 64
"""Number of different factors for data indices, so that differences of several data indices do not cancel."""

_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
"""Odd numbers of 61 or 62 bits without a pattern, for hashing."""


class DataConsistencyCheck:
    """A hash of the tensors that this rank got since the last `forget`."""

    def __init__(self, mesh: Mesh, *, compare_first: bool = True) -> None:
        """Start with an empty hash.

        Args:
            mesh: The process groups.
            compare_first: Compare the first tensors at once, which is collective over all ranks.
        """
        self._mesh = mesh
        peers = math.prod(mesh.layout.size(axis) for axis in _ONE_BATCH)
        leads = all(mesh[axis].index == 0 for axis in _ONE_BATCH)
        # (peers - 1) times the first peer's number, minus the numbers of the others: 0 if all are equal.
        self._factor = (peers - 1 if leads else -1) * (mesh.data_index % _FACTORS + 1)
        self._alone = peers == 1
        self._compare_next = compare_first
        self._count = 0
        """Number of tensors so far."""
        self._sums: dict[str, Tensor] = {}
        """Sum of the tensors' numbers by kind of device, () int64 each."""
        self._weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def look(self, given: Any) -> None:
        """Add all tensors of a micro-batch to the hash, on their device.

        Args:
            given: A micro-batch: tensors in any nesting of tuples, lists and dicts.

        Raises:
            ValueError: On all ranks, if the first tensors differ between peers.
        """
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
        """Return this rank's term of the sum over all ranks, () float64 on the device; None if no rank has peers."""
        if self._alone:
            return None
        total = torch.full((), self._on_host(), dtype=torch.int64, device=self._mesh.device)
        for kind, number in self._sums.items():
            total = total if kind == "cpu" else total + number
        # Only the top bits, so that the sum over ranks is exact in float64.
        small = (total >> (64 - _BITS)).double() * self._factor
        return small + (SAME if self._mesh.everyone.index == 0 else 0.0)

    def forget(self) -> None:
        """Clear the hash after a step ended or was given up."""
        self._count = 0
        self._sums.clear()

    def error(self) -> ValueError:
        """Return the error that names the ranks with other tensors than their peers.

        Collective over all ranks, for a sum of `take` that is not `SAME`.
        """
        own = sum(int(number) for number in self._sums.values()) % 2**64
        return self._error(self._mesh.everyone.collect([self._mesh.data_index, own]))

    # ---- private -----------------------------------------------------------------------------------------------------

    def _number_of(self, tensor: Tensor) -> Tensor:
        values = tensor.detach().reshape(-1)
        # Sample large tensors with a stride.
        values = values[:: max(1, math.ceil(values.numel() / _SAMPLED_ELEMENTS))]
        # The bits of floats as integers, because integer sums do not depend on the order.
        values = values.double().view(torch.int64) if values.is_floating_point() else values.long()
        weights = self._weights_of(values.numel(), values.device)
        return (values * weights).sum() * (_ODD[2] + 2 * self._count)

    def _weights_of(self, count: int, device: torch.device) -> Tensor:
        """Return (count,) int64 weights, the same on all ranks.

        The cache grows to the largest count, at most 512 KiB.
        """
        kept = self._weights.get(device.type)
        if kept is None or kept.numel() < count:
            # Computed on the device: a copy to the device would cause a sync.
            mixed = torch.arange(1, count + 1, device=device) * _ODD[0]
            kept = self._weights[device.type] = (mixed ^ (mixed >> 31)) * _ODD[1]
        return kept[:count]

    def _on_host(self) -> int:
        """Return the number of the host tensors."""
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
        reported = []
        for members in peers.values():
            others = [rank for rank, given in members if given != members[0][1]]
            if others:
                reported.append(f"rank {', '.join(map(str, others))} not what rank {members[0][0]} was given")
        *others, last = (axis for axis in _ONE_BATCH if axis in ALWAYS_NAMED or layout.size(axis) > 1)
        return ValueError(
            f"under {layout} ranks that differ only along {', '.join(others)} and {last} compute "
            f"one batch together, but were given different tokens: {'; '.join(reported)}. Choose data by "
            "engine.mesh.data_index instead of the rank, or take them from the loader that initialize returns"
        )


_GRADIENT_CHECK_STEPS = 5
"""Largest number of checked steps.

With a warm-up from 0 and an adapter layer initialised with zeros, earlier layers get their first gradient in step 3.
"""

_SAMPLED_GRADIENT_ELEMENTS = 2**16
"""Largest number of sampled elements of a gradient."""

_NUMBERS = 4
"""Linear functions per gradient.

If ranks hold parts, all of them differ by less than `_TOLERANCE` once in a million.
"""

_TOLERANCE = 0.03
"""Tolerated difference, relative to the norm of the gradient. The order of bfloat16 sums causes smaller differences."""


class GradientConsistencyCheck:
    """A comparison of gradients that tensor-parallel peers must have in common."""

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
        """Trained parameters that each tensor rank holds whole, in the same order on all peers."""
        self._seen: dict[str, Tensor] = {}
        """(1 + _NUMBERS,) float64 by parameter: the sum of squares, then the linear functions."""
        self._differ: list[Tensor] = []
        """(len(_names),) bool: the differences found in the step that has ended."""
        self._gradients = [flat.gradient for zero in zeros for flat in zero.flats if flat.gradient is not None]
        if self._left:
            for gradient in self._gradients:
                gradient.look = partial(self._look, [slot.name for slot in gradient.slots], {*self._names})

    def take(self) -> Tensor | None:
        """Compare gradients with tensor peers, and return the term of this rank for the sum over all ranks.

        Collective over tensor peers in the first steps.

        Returns:
            (2,) float64 on the device: the number of parameters with differing gradients, and of those without a
            gradient so far. None after the checked steps.
        """
        if not self._left:
            return None
        device = self._mesh.device
        nothing = torch.zeros(1 + _NUMBERS, dtype=torch.float64, device=device)
        own = torch.stack([nothing, *(self._seen.get(name, nothing) for name in self._names)])
        # Row 0 is a placeholder, so that a rank without such parameters can stack and gather too.
        every = self._mesh["tp"].gather_along(own, 0).view(-1, *own.shape)[:, 1:]
        norms = every[..., 0].amax(0).sqrt()
        separate = (every[..., 1:] - every[0, :, 1:]).abs().amax(0)
        self._differ = [(separate > _TOLERANCE * norms[:, None]).any(1)]
        return torch.stack([self._differ[0].sum(), (norms == 0).sum()]).double()

    def took(self, unseen: int) -> None:
        """Count a step with an update, and end the check if it is complete.

        Args:
            unseen: Parameters without a gradient so far, summed over all ranks.
        """
        if not self._left:
            return
        self._left = self._left - 1 if unseen else 0
        if not self._left:
            for gradient in self._gradients:
                gradient.look = None

    def forget(self) -> None:
        """Clear the numbers after a step ended or was given up."""
        self._seen.clear()
        self._differ.clear()

    def error(self, step: int, *, updated: bool) -> PlanError:
        """Return the error that names parameters with differing gradients. Collective over all ranks.

        Args:
            step: Number of the step.
            updated: Whether backward has already applied the gradients.
        """
        own = [self._names[place] for differ in self._differ for place in differ.nonzero().flatten().tolist()]
        names = list(dict.fromkeys(name for reported in self._mesh.everyone.collect(own) for name in reported))
        more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
        module = names[0].rpartition(".")[0]
        made = "optimizer.in_backward has made the update: set up the engine again" if updated else "No update was made"
        return PlanError(
            f"step {step}: the gradients of {names[0]}{more} differ between the ranks of tp {self._mesh.layout.tp}, "
            "which hold it whole: each sees its part of the values only, as between two layers that are cut. Say "
            f"so with tp_plan={{…, {module!r}: 'replicated_with_grad_allreduce'}}. {made}. (Ranks that draw random "
            "numbers of their own differ, too.)"
        )

    # ---- private -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _look(self, names: list[str], whole: set[str], index: int, gradient: Tensor) -> None:
        name = names[index]
        if name not in whole:
            return
        values = gradient.detach().reshape(-1)
        values = values[:: max(1, math.ceil(values.numel() / _SAMPLED_GRADIENT_ELEMENTS))].double()
        # Weights without a pattern that need no random generator and are equal on all ranks.
        places = torch.arange(1, values.numel() + 1, dtype=torch.float64, device=values.device)
        weights = torch.stack([torch.cos(places * places * (0.7 + number)) for number in range(_NUMBERS)])
        numbers = torch.cat([(values @ values).view(1), weights @ values])
        self._seen[name] = self._seen[name] + numbers if name in self._seen else numbers


_WORD = 8

_WRITE_CHECK_STEPS = 2
"""Number of checked steps. A loop that clamps weights after its update is found in the second step."""


class UntrackedWriteCheck:
    """A check for writes to parameters that bypass torch's version counter, on this rank."""

    def __init__(self, zeros: Iterable[Zero], everyone: Group, *, compares_masters: bool) -> None:
        """Watch all units.

        Args:
            zeros: The partitioners of the model parts.
            everyone: All ranks.
            compares_masters: Whether masters and resident parameters belong to the same update at the end of a step.
        """
        self._everyone, self._compares_masters = everyone, compares_masters
        self._left = _WRITE_CHECK_STEPS
        self._units = [unit for zero in zeros for unit in zero.units]
        for unit in self._units:
            unit.watch = self
        self._came: dict[str, Tensor] = {}
        """(parameters,) int64 by flat parameter: word sums of the gathered ones."""
        self._written: dict[str, Tensor] = {}
        """(parameters,) bool by flat parameter."""
        self._versions: dict[str, int] = {}
        """Torch's version counter of each master at its last copy to the parameters, by flat parameter."""
        self.updated()

    @torch.no_grad()
    def came(self, unit: Unit) -> None:
        """Store the word sums of a unit that was just gathered.

        Args:
            unit: The gathered unit.
        """
        for flat in unit.flats:
            self._came[flat.name] = _numbers(flat.full, flat)

    @torch.no_grad()
    def goes(self, unit: Unit) -> None:
        """Compare the word sums of a unit that is about to be released.

        Args:
            unit: The unit; its values are still gathered.
        """
        for flat in unit.flats:
            before = self._came.pop(flat.name, None)
            if before is not None:
                # A write that torch counted is lost, too, because the release drops the gathered values.
                seen = [flat.is_written(index) for index in range(len(flat.slots))]
                changed = before != _numbers(flat.full, flat)
                self._add(flat, changed | torch.tensor(seen, device=changed.device) if any(seen) else changed)

    @torch.no_grad()
    def take(self, device: torch.device) -> Tensor | None:
        """Return the number of changed parameters for the sum over all ranks.

        Args:
            device: The device of the result.

        Returns:
            () float64 on the device; None after the checked steps.
        """
        if not self._left:
            return None
        if self._compares_masters:
            for flat in self._flats:
                self._compare_masters(flat)
        found = [written.sum() for written in self._written.values()]
        return torch.stack(found).sum().double() if found else torch.zeros((), dtype=torch.float64, device=device)

    def took(self) -> None:
        """Count a step with an update, and end the check after the last one."""
        self._left = max(0, self._left - 1)
        if not self._left:
            for unit in self._units:
                unit.watch = None
            self._units, self._came = [], {}

    def forget(self) -> None:
        """Clear the results after a step ended or was given up."""
        self._written.clear()

    def updated(self) -> None:
        """Record that parameters are copies of the masters now."""
        self._versions = {flat.name: flat.master._version for flat in self._flats}

    def error(self, step: int, *, updated: bool) -> RuntimeError:
        """Return the error that names the changed parameters. Collective over all ranks.

        Args:
            step: Number of the step.
            updated: Whether backward has already applied their gradients.
        """
        own = [
            flat.slots[index].name
            for flat in self._flats
            for index in self._written.get(flat.name, torch.zeros(0)).nonzero().flatten().tolist()
        ]
        names = list(dict.fromkeys(name for reported in self._everyone.collect(own) for name in reported))
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        made = "optimizer.in_backward has made the update: set up the engine again" if updated else "No update was made"
        return RuntimeError(
            f"step {step}: {names[0]}{more}: written into through parameter.data, where the engine cannot see it and "
            "the values are lost. Write into the parameter itself, under torch.no_grad() and between two steps; a "
            f"forward that writes into its own needs a ZeRO stage below 3. {made}"
        )

    # ---- private -----------------------------------------------------------------------------------------------------

    @property
    def _flats(self) -> list[FlatParam]:
        return [flat for unit in self._units for flat in unit.flats]

    def _compare_masters(self, flat: FlatParam) -> None:
        narrow = flat.narrow
        stays = not (flat.zero_policy.params_unsharded_on_demand or flat.is_offloaded or flat.rounded or flat.ahead)
        # Writes that torch has counted, in parameters or masters, are copied to both later.
        if narrow is None or not stays or flat.written() or flat.master._version != self._versions[flat.name]:
            return
        low, high = flat.state_range
        made = flat.master.to(narrow.dtype)
        # NaN counts as equal to NaN.
        differs = (narrow != made) & ~(narrow.isnan() & made.isnan())
        ranges = [slice(max(slot.range.start, low) - low, min(slot.range.stop, high) - low) for slot in flat.slots]
        here = [differs[own].any() if own.start < own.stop else differs.new_zeros(()) for own in ranges]
        self._add(flat, torch.stack(here))

    def _add(self, flat: FlatParam, written: Tensor) -> None:
        before = self._written.get(flat.name)
        self._written[flat.name] = written if before is None else before | written


def _numbers(full: Tensor, flat: FlatParam) -> Tensor:
    words, size = (
        full.view(torch.int64),
        full.element_size(),
    )  # A sum of 8-byte words needs no wider copy of the values.
    ends = [(slot.range.start * size // _WORD, -(-slot.range.stop * size // _WORD)) for slot in flat.slots]
    return torch.stack([words[start:stop].sum() for start, stop in ends])
