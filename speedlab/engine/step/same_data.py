"""Whether ranks that compute one batch together were given the same one.

Tensor and pipeline ranks of one data index each do a part of the same computation; given other tokens than its peers, a
rank makes numbers that look like a training and are none.

1. Each tensor that comes in becomes a number, a random linear function of its elements modulo 2⁶⁴, on its device:
   nothing waits for it.
2. Before the first forward, while nothing depends on time yet, peers compare shapes and numbers over the host.
3. From then on the number rides on the sums that end a step: the first of k peers adds (k - 1) times its number, each
   other one subtracts its own, so that the sum over all ranks is 0 where peers have the same.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from speedlab.parallel.mesh import Mesh
from speedlab.parallel.zero import map_tensors

_SAMPLED = 2**16
"""At most so many elements of a tensor are looked at."""

_BITS = 22
"""Of a number that travels. Sums over 2¹⁶ ranks, each with a factor below 2¹⁴, are whole numbers that float64 holds."""

_FACTORS = 64
"""Data indices have so many factors in turn, so that differences of several do not cancel."""


class SameData:
    """What this rank was given since the last `take`, as one number."""

    def __init__(self, mesh: Mesh, *, compare_first: bool = True) -> None:
        """`compare_first`: whether the first tensors are compared at once; collective over all ranks then."""
        self._mesh = mesh
        peers = mesh.layout.tp * mesh.layout.pp
        leads = mesh["tp"].index == mesh["pp"].index == 0
        self._factor = (peers - 1 if leads else -1) * (mesh.data_index % _FACTORS + 1)
        self._alone = peers == 1
        self._compare_next = compare_first
        self._number: Tensor | None = None
        self._weights: Tensor | None = None

    def look(self, given: Any) -> None:
        """Take note of all tensors in `given`. Raises ValueError on all ranks when the first ones differ."""
        if self._alone:
            return
        tensors: list[Tensor] = []
        map_tensors(given, lambda tensor: tensors.append(tensor) or tensor)
        for tensor in tensors:
            number = self._number_of(tensor)
            self._number = number if self._number is None else torch.add(number, self._number, alpha=31)
        if self._compare_next:
            self._compare([[*tensor.shape] for tensor in tensors])
            self._compare_next = False

    def take(self) -> Tensor | None:
        """What to add up over all ranks, () float64 on the device: 0 where peers were given the same. None where
        nothing was given or this rank has no peers. What was looked at stays known until `forget`."""
        return None if self._number is None else (self._number >> (64 - _BITS)).double() * self._factor

    def forget(self) -> None:
        """A step has ended, or is given up."""
        self._number = None

    def error(self) -> ValueError:
        """Which ranks had something else than their peers. Collective over all ranks, where the sum of `take` is
        not 0."""
        return self._error(self._mesh.everyone.collect([self._mesh.data_index, self._here()]))

    # ---- inside ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _number_of(self, tensor: Tensor) -> Tensor:
        values = tensor.detach().reshape(-1)
        values = values[:: max(1, math.ceil(values.numel() / _SAMPLED))]
        values = values.double().view(torch.int64) if values.is_floating_point() else values.long()
        if self._weights is None or self._weights.device != values.device:
            generator = torch.Generator().manual_seed(0)
            limits = torch.iinfo(torch.int64)
            weights = torch.randint(limits.min, limits.max, (_SAMPLED,), generator=generator)
            self._weights = weights.to(values.device)
        return (values * self._weights[: values.numel()]).sum()

    def _here(self) -> int:
        """The number on the host, which waits for the device."""
        return 0 if self._number is None else int(self._number)

    def _compare(self, shapes: list[list[int]]) -> None:
        mesh, own = self._mesh, [shapes, self._here()]
        differ = any(theirs != own for axis in ("tp", "pp") for theirs in mesh[axis].collect(own))
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
        return ValueError(
            f"under {layout} ranks that differ only along tp and pp compute one batch together, but were given "
            f"different tokens: {'; '.join(told)}. Choose data by engine.mesh.data_index instead of the rank, or take "
            "them from the loader that initialize returns"
        )
