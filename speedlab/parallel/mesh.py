"""The mesh of a layout as one rank sees it: a group of ranks for each named axis."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from speedlab.comm import CommStats, Group, World
from speedlab.comm.process_groups import groups_of_world
from speedlab.layout import AXES, REPLICATED, Layout

ENDS = "ends"
"""The first and the last pipeline rank of one dp and tp index, which both hold tied embeddings. No axis of the mesh,
but gradients are summed over it."""


class Mesh:
    """This rank's groups. `mesh["tp"]` are the ranks that differ from it along tp only."""

    def __init__(self, layout: Layout, world: World, traffic: CommStats) -> None:
        """Collective over all ranks."""
        rank, device = world.rank, world.device
        self.layout, self.rank, self.device = layout, rank, device
        self._traffic = traffic
        self._others: dict[tuple[str, tuple[int, ...]], Group] = {}
        self.axes = {axis: Group(layout.peers(rank, axis), traffic, device, channel=axis) for axis in AXES}
        # Along cp ranks also share what they compute: gathers have connections of their own there.
        channel = "dp" if layout.cp == 1 else "gather"
        members = layout.peers(rank, *REPLICATED)
        alike = layout.peers(rank, "islands", *REPLICATED)
        self.gather = self.axes["dp"] if channel == "dp" else Group(members, traffic, device, channel=channel)
        """The ranks that hold the same part of the model: parameters come together over it."""
        self.alike = self.gather if alike == members else Group(alike, traffic, device, channel="alike")
        """The same ranks of all islands, which begin with the same values."""
        # A device's communicators cost memory and start-up, and there gathers and reductions come in one order on all
        # ranks: they share one.
        self.reduce = Group(self.gather.ranks, traffic, device, channel="reduce" if device.type == "cpu" else channel)
        """The same ranks: gradients are summed over it, on CPUs in an order of its own."""
        self.everyone = Group(range(layout.world_size), traffic, device, channel="everyone")
        line = self.axes["pp"].ranks
        ends = [line[0], line[-1]] if layout.pp > 1 else []
        channel = "pp" if ends == line else ENDS
        self.ends = Group(ends, traffic, device, channel=channel) if rank in ends else None
        self._lacks_ends = bool(ends) and rank not in ends
        self._make_spare_wires()

    def __getitem__(self, axis: str) -> Group:
        return self.axes[axis]

    @property
    def data_index(self) -> int:
        """Which share of the global batch this rank sees."""
        return self.layout.data_index(self.rank)

    @property
    def counts_losses(self) -> bool:
        """Whether this rank's losses count; those of its peers along tp and cp are the same."""
        return self.axes["tp"].index == self.axes["cp"].index == 0

    @property
    def summed_first(self) -> dict[str, Group]:
        """Groups over which terms of a gradient are summed before those of the dp ranks, by the names that rows of the
        placement table have for them."""
        found = {"tp": self.axes["tp"]}
        return found if self.ends is None else found | {ENDS: self.ends}

    @property
    def groups(self) -> list[Group]:
        """All, in the order in which they were made."""
        made = [*self.axes.values(), self.gather, self.alike, self.reduce, self.everyone]
        return list(dict.fromkeys([*made, *([self.ends] if self.ends is not None else []), *self._others.values()]))

    def group(self, channel: str, ranks: Sequence[int]) -> Group:
        """Another group of ranks, this one among them; the same when it is asked for again. Collective: all ranks ask
        for groups of the same channels in the same order."""
        key = channel, tuple(ranks)
        if key not in self._others:
            self._others[key] = Group(ranks, self._traffic, self.device, channel=channel)
        return self._others[key]

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The same as torch's DeviceMesh, on the same connections, for what stands beside the engine (DTensor, FSDP).
        Collective over all ranks the first time, as axes of one rank get groups of their own."""
        groups = [groups_of_world(axis, tuple(group.ranks)).group for axis, group in self.axes.items()]
        ranks = torch.arange(self.layout.world_size).view(self.layout.mesh_shape)
        return DeviceMesh.from_group(groups, self.device.type, ranks, mesh_dim_names=AXES)

    def _make_spare_wires(self) -> None:
        # Every rank must make equally many groups, or torch names them differently.
        if self._lacks_ends:
            groups_of_world(ENDS, (dist.get_rank(),))

    def disconnect(self) -> None:
        """Let go of all connections."""
        for group in self.groups:
            group.disconnect()
        self.__dict__.pop("device_mesh", None)

    def reconnect(self) -> None:
        """Use the present world's connections. Collective, in the order in which the groups were made."""
        for group in self.groups:
            group.reconnect()
        self._make_spare_wires()
