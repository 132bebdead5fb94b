"""Whether ranks that compute one batch together were given the same one.

Tensor, context and pipeline ranks of one data index each do a part of the same computation; given other tokens than its
peers, a rank makes numbers that look like a training and are none.

1. Each tensor that comes in becomes a number, a linear function of its elements modulo 2⁶⁴, where the tensor is: on a
   GPU nothing waits for it. The number of a step is the sum of those.
2. The first time, peers compare shapes, and the numbers of what came on the host, before anything is computed.
3. From then on the number rides on the sums that end a step: the first of k peers adds (k - 1) times its number, each
   other one subtracts its own, so that nothing is left in the sum over all ranks where peers have the same. The first
   rank of all adds `SAME`, which tells such a sum from one that never came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from speedlab.layout import ALWAYS_NAMED, AXES, KINDS
from speedlab.parallel.mesh import Mesh
from speedlab.parallel.zero import map_tensors

_ONE_BATCH = tuple(axis for axis in reversed(AXES) if not KINDS[axis].sees_other_data)
"""Axes along which ranks compute one batch."""

SAME = 1.0
"""The sum over all ranks of what `take` gives, where peers were given the same."""

_SAMPLED = 2**16
"""At most so many elements of a tensor are looked at."""

_BITS = 22
"""Of a number that travels. Sums over 2¹⁶ ranks, each with a factor below 2¹⁴, are whole numbers that float64 holds."""

_FACTORS = 64
"""Data indices have so many factors in turn, so that differences of several do not cancel."""

_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9, 0x14D049BB133111EB)
"""Odd numbers of 61 or 62 bits without a pattern."""


class SameData:
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
        values = values[:: max(1, math.ceil(values.numel() / _SAMPLED))]
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
